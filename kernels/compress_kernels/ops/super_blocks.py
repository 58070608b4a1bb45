"""Weights in llama.cpp's blocks: arguments checked, then one implementation by device."""

import torch
from torch import Tensor

from compress_kernels.blocks.layouts import LAYOUTS, BlockLayout
from compress_kernels.blocks.search import search_of
from compress_kernels.cpu import super_blocks as cpu
from compress_kernels.cpu.library import native
from compress_kernels.ops.checks import require, require_matrix, wrong
from compress_kernels.reference import super_blocks as reference


def round_blocks(kind: str, weight: Tensor, importance: Tensor | None) -> Tensor:
    """weight: fp32 [N, K], finite -> bytes of its blocks, uint8 [N, K / numbers * size].

    kind: a key of LAYOUTS. importance: fp32 [K], 0 or more, what the squared error of a column
    weighs (the mean square of the inputs that it multiplies); None for all alike.
    Raises ValueError on an unknown kind, another shape or dtype, or rows that are no whole blocks.
    """
    layout = _layout(kind)
    width = _check_weight(layout, weight)[1]
    if weight.numel() == 0:
        width = width // layout.numbers * layout.size
        return weight.new_empty(weight.shape[0], width, dtype=torch.uint8)
    if importance is None:
        importance = torch.ones(width, device=weight.device)
    require_matrix("importance", importance, (width,), torch.float32, weight.device)
    # A column that calibration never drove counts a little, so that it decides where nothing does.
    importance = importance.clamp_min(1e-6 * float(importance.mean()) + 1e-30)
    search = search_of(layout)
    if _compiled(weight):
        return cpu.round_blocks(layout, weight, importance, search)
    return reference.round_blocks(layout, weight, importance, search)


def decode_blocks(kind: str, data: Tensor) -> Tensor:
    """data: uint8 [N, bytes] -> fp32 [N, K], to the bit what ggml decodes.

    Raises ValueError on an unknown kind, another shape or dtype, or rows that are no whole blocks.
    """
    layout = _layout(kind)
    if data.dim() != 2 or data.dtype != torch.uint8 or data.shape[1] % layout.size:
        raise wrong("data", data, f"torch.uint8 [N, a multiple of {layout.size}]")
    if data.numel() == 0:
        width = data.shape[1] // layout.size * layout.numbers
        return data.new_empty(data.shape[0], width, dtype=torch.float32)
    if _compiled(data):
        return cpu.decode_blocks(layout, data)
    return reference.decode_blocks(layout, data)


def settle_blocks(
    kind: str, weight: Tensor, data: Tensor, factor: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    """GPTQ's column loop within blocks: their scales stay, their codes are chosen one column after
    the other, each making up for what the ones before it lost.

    weight: fp32 [N, K], columns in the order they are visited. data: uint8 [N, bytes], blocks of
    the same columns in the order they are stored. factor: hessian_factor of the Hessian in visited
    order, fp32 [K, K]. order: [K], where each visited column is stored.
    Returns new blocks, and weight less what they hold: fp32 [N, K] in visited order.
    Raises ValueError on an unknown kind or another shape or dtype.
    """
    layout = _layout(kind)
    rows, width = _check_weight(layout, weight)
    require_matrix("factor", factor, (width, width), torch.float32, weight.device)
    size = width // layout.numbers * layout.size
    require_matrix("data", data, (rows, size), torch.uint8, weight.device)
    visited = order.dim() == 1 and torch.equal(
        order.sort().values.long().cpu(), torch.arange(width)
    )
    require(visited, "order", f"{list(order.shape)}", f"each of 0 to {width - 1} once")
    if _compiled(weight):
        return cpu.settle_blocks(layout, weight, data, factor, order)
    return reference.settle_blocks(layout, weight, data, factor, order)


def _compiled(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and tensor.device.type == "cpu" and native().library is not None


def _check_weight(layout: BlockLayout, weight: Tensor) -> tuple[int, int]:
    if weight.dim() != 2 or weight.dtype != torch.float32 or weight.shape[1] % layout.numbers:
        raise wrong("weight", weight, f"torch.float32 [N, a multiple of {layout.numbers}]")
    return weight.shape[0], weight.shape[1]


def _layout(kind: str) -> BlockLayout:
    require(kind in LAYOUTS, "kind", repr(kind), f"one of {', '.join(LAYOUTS)}")
    return LAYOUTS[kind]
