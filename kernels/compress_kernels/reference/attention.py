"""Attention over blocks of keys and values, token by token, in plain torch."""

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """As attention.paged_attention, arguments checked."""
    tokens, heads, dim = q.shape
    kv_heads, block_size = keys.shape[1], keys.shape[2]
    out = torch.empty_like(q)
    for t in range(tokens):
        position = int(positions[t])
        first = 0 if window is None else max(0, position - window + 1)
        seen = torch.arange(first, position + 1, device=q.device)
        blocks, offsets = table[sequence[t]][seen // block_size].long(), seen % block_size
        k = _stored(keys, key_scales, blocks, offsets)
        v = _stored(values, value_scales, blocks, offsets)
        grouped = q[t].float().reshape(kv_heads, heads // kv_heads, dim)
        scores = torch.einsum("hgd,lhd->hgl", grouped, k) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.softmax(dim=-1)
        out[t] = torch.einsum("hgl,lhd->hgd", weights, v).reshape(heads, dim).to(q.dtype)
    return out


def _stored(states: Tensor, scales: Tensor | None, blocks: Tensor, offsets: Tensor) -> Tensor:
    """Keys or values of some positions: fp32 [positions, kv_heads, head_dim]."""
    found = states[blocks, :, offsets].float()
    return found if scales is None else found * scales[blocks, :, offsets, None].float()
