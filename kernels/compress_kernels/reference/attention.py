"""Attention over blocks of keys and values, token by token, in plain torch."""

import torch
from torch import Tensor

from compress_kernels.paged import StoredStates, TokenPlaces


def paged_attention(
    q: Tensor,
    stored: StoredStates,
    places: TokenPlaces,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As attention.paged_attention, arguments checked."""
    tokens, heads, dim = q.shape
    kv_heads, block_size = stored.keys.shape[1], stored.keys.shape[2]
    out = q.new_empty(tokens, heads, stored.values.shape[3])
    for t in range(tokens):
        position = int(places.positions[t])
        first = 0 if window is None else max(0, position - window + 1)
        seen = torch.arange(first, position + 1, device=q.device)
        table = places.table[places.sequence[t]]
        blocks, offsets = table[seen // block_size].long(), seen % block_size
        k = _read(stored.keys, stored.key_scales, blocks, offsets)
        v = _read(stored.values, stored.value_scales, blocks, offsets)
        grouped = q[t].float().reshape(kv_heads, heads // kv_heads, dim)
        scores = torch.einsum("hgd,lhd->hgl", grouped, k) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.softmax(dim=-1)
        out[t] = torch.einsum("hgl,lhd->hgd", weights, v).reshape(heads, -1).to(q.dtype)
    return out


def _read(states: Tensor, scales: Tensor | None, blocks: Tensor, offsets: Tensor) -> Tensor:
    """Keys or values of some positions: fp32 [positions, kv_heads, width]."""
    found = states[blocks, :, offsets].float()
    return found if scales is None else found * scales[blocks, :, offsets, None].float()
