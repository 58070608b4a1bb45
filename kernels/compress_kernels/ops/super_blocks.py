"""Weights in llama.cpp's blocks: arguments checked, then one implementation by device."""

import torch
from torch import Tensor

from compress_kernels.block_search import search_of
from compress_kernels.cpu import super_blocks as cpu
from compress_kernels.cpu.library import native
from compress_kernels.ops.checks import require, wrong
from compress_kernels.reference import super_blocks as reference
from compress_kernels.super_blocks import LAYOUTS, BlockLayout


def round_blocks(kind: str, weight: Tensor, importance: Tensor | None) -> Tensor:
    """weight: fp32 [N, K], finite -> bytes of its blocks, uint8 [N, K / numbers * size].

    kind: a key of LAYOUTS. importance: fp32 [K], 0 or more, what the squared error of a column
    weighs (the mean square of the inputs that it multiplies); None for all alike.
    Raises ValueError on an unknown kind, another shape or dtype, or rows that are no whole blocks.
    """
    layout = _layout(kind)
    if weight.dim() != 2 or weight.dtype != torch.float32 or weight.shape[1] % layout.numbers:
        raise wrong("weight", weight, f"torch.float32 [N, a multiple of {layout.numbers}]")
    if importance is not None and (
        tuple(importance.shape) != (weight.shape[1],) or importance.dtype != torch.float32
    ):
        raise wrong("importance", importance, f"torch.float32 [{weight.shape[1]}]")
    if importance is None:
        importance = torch.ones(weight.shape[1], device=weight.device)
    # A column that calibration never drove counts a little, so that it decides where nothing does.
    importance = importance.clamp_min(1e-6 * float(importance.mean()) + 1e-30)
    if weight.numel() and weight.device.type == "cpu" and native().library is not None:
        return cpu.round_blocks(layout, weight, importance, search_of(layout))
    return reference.round_blocks(layout, weight, importance)


def decode_blocks(kind: str, data: Tensor) -> Tensor:
    """data: uint8 [N, bytes] -> fp32 [N, K], to the bit what ggml decodes.

    Raises ValueError on an unknown kind, another shape or dtype, or rows that are no whole blocks.
    """
    layout = _layout(kind)
    if data.dim() != 2 or data.dtype != torch.uint8 or data.shape[1] % layout.size:
        raise wrong("data", data, f"torch.uint8 [N, a multiple of {layout.size}]")
    if data.numel() and data.device.type == "cpu" and native().library is not None:
        return cpu.decode_blocks(layout, data)
    return reference.decode_blocks(layout, data)


def _layout(kind: str) -> BlockLayout:
    require(kind in LAYOUTS, "kind", repr(kind), f"one of {', '.join(LAYOUTS)}")
    return LAYOUTS[kind]
