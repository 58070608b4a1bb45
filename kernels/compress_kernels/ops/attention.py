"""Attention of a flat batch over keys and values that lie in blocks.

The order of sums of compiled code, with L lanes (16 with AVX-512, 8 elsewhere), for each token and
head alone, whatever else a step holds:

1. A score is the product of query and key in L lanes, lane i of the numbers i, i + L, ..., each a
   chain of fused multiply-adds; lanes are folded half on half. Then times the key's scale (int8),
   times `scale`, then the soft cap.
2. Positions lie in runs of 256, from multiples of 256 of the text on; a window may begin inside of
   one. A run's weights are exp(score - largest of the run that is seen). Their sum is in L lanes by
   position modulo L, folded half on half. Each number of the values is one chain of fused
   multiply-adds in the order of positions, with weights times the value's scale (int8).
3. Runs are merged first to last: both sides times exp(their largest score - the larger of both).

What a token does not see enters no sum, so it may be anything. Where a run is computed (by which
thread, beside which rows, over which blocks) cannot be seen in a result.
"""

import torch
from torch import Tensor

from compress_kernels.cpu import attention as cpu_attention
from compress_kernels.cpu.library import native
from compress_kernels.ops import tiled_attention
from compress_kernels.ops.checks import require_whole, wrong
from compress_kernels.paged import StoredStates, TokenPlaces

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def paged_attention(
    q: Tensor,
    stored: StoredStates,
    places: TokenPlaces,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """What each token takes from the positions that it sees: [T, heads, value width], in q's dtype.

    q: [T, heads, key width], bf16, fp16 or fp32. places: of the T tokens. Token t sees positions
    max(0, p - window + 1) to p of its sequence, as they are stored; sums are in fp32. scale: of the
    products of queries and keys. softcap: c of c * tanh(score / c).

    No token's result depends on the other tokens. Raises ValueError on a wrong shape or dtype,
    and on keys, values or scales that are not contiguous, but for values that are the first
    numbers of the keys.
    """
    _check_states(q, stored)
    _check_scales(stored.keys, stored.key_scales, "key_scales")
    _check_scales(stored.values, stored.value_scales, "value_scales")
    _check_places(len(q), places)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be 1 or more")
    compiled = q.device.type == "cpu" and native().library is not None
    attend = cpu_attention.paged_attention if compiled else tiled_attention.paged_attention
    return attend(q, stored, places, scale=scale, window=window, softcap=softcap)


def _check_states(q: Tensor, stored: StoredStates) -> None:
    keys, values = stored.keys, stored.values
    if q.dim() != 3 or q.dtype not in FLOATS:
        raise wrong("q", q, "floats [T, heads, key width]")
    heads, dim = q.shape[1:]
    if keys.dim() != 4 or keys.shape[3] != dim or heads % keys.shape[1]:
        form = f"[blocks, kv_heads, block size, {dim}], kv_heads a divisor of {heads}"
        raise wrong("keys", keys, form)
    if values.shape[:-1] != keys.shape[:-1] or not values.shape[3] or values.dtype != keys.dtype:
        form = f"the shape of keys but for its last size, {list(keys.shape)}, and their dtype"
        raise wrong("values", values, form)
    require_whole("keys", keys)
    if not stored.shared:
        require_whole("values", values)


def _check_places(tokens: int, places: TokenPlaces) -> None:
    if places.table.dim() != 2 or places.table.dtype != torch.int32:
        raise wrong("table", places.table, "int32 [S, blocks]")
    for name, index, dtype in (
        ("sequence", places.sequence, torch.int32),
        ("positions", places.positions, torch.int64),
    ):
        if index.shape != (tokens,) or index.dtype != dtype:
            raise wrong(name, index, f"{dtype} [{tokens}]")


def _check_scales(states: Tensor, scales: Tensor | None, name: str) -> None:
    if states.dtype != torch.int8:
        if states.dtype not in FLOATS or scales is not None:
            raise ValueError(f"{states.dtype} goes without {name}; int8 and floats can be stored")
        return
    if scales is None:
        raise ValueError(f"{name} is missing; int8 needs fp16 {list(states.shape[:3])}")
    if scales.shape != states.shape[:3] or scales.dtype != torch.float16:
        raise wrong(name, scales, f"fp16 {list(states.shape[:3])}")
    require_whole(name, scales)
