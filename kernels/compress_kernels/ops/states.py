"""Keys and values of a step go into blocks."""

import torch
from torch import Tensor

from compress_kernels.cpu import states as cpu_states
from compress_kernels.cpu.library import native
from compress_kernels.ops.checks import require_whole, wrong
from compress_kernels.reference import states as reference_states

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def store_states(
    source: Tensor, target: Tensor, slots: Tensor, scales: Tensor | None = None
) -> None:
    """Writes keys or values of T tokens, in place.

    source: [T, kv_heads, head_dim], bf16, fp16 or fp32. target: [blocks, kv_heads, block size,
    head_dim], floats, or int8 with `scales`, fp16 [blocks, kv_heads, block size]. slots: int64 [T],
    block * block size + offset. As int8 each token and head gets the scale max |x| / 127, rounded
    to fp16, and codes round(x / scale). Raises ValueError on a wrong shape or dtype, and on
    a target or scales that are not contiguous.
    """
    heads, dim = target.shape[1], target.shape[3]
    if source.shape[1:] != (heads, dim) or source.dtype not in FLOATS:
        raise wrong("source", source, f"floats [T, {heads}, {dim}]")
    if slots.shape != source.shape[:1] or slots.dtype != torch.int64:
        raise wrong("slots", slots, f"int64 [{source.shape[0]}]")
    if target.dtype == torch.int8:
        if scales is None:
            raise ValueError(f"scales are missing; int8 needs fp16 {list(target.shape[:3])}")
        if scales.shape != target.shape[:3] or scales.dtype != torch.float16:
            raise wrong("scales", scales, f"fp16 {list(target.shape[:3])}")
    elif target.dtype not in FLOATS or scales is not None:
        raise ValueError(f"{target.dtype} goes without scales; int8 and floats can be stored")
    require_whole("target", target)
    require_whole("scales", scales)
    compiled = target.device.type == "cpu" and native().library is not None
    store = cpu_states.store_states if compiled else reference_states.store_states
    store(source, target, slots, scales)
