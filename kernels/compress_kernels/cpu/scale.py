"""Group scales by csrc/columns.cpp; the specification is reference.scale."""

import ctypes

import torch
from torch import Tensor

from compress_kernels.cpu.library import Block, address, grid_struct, native
from compress_kernels.gptq.problem import Grid


def group_scale(
    w: Tensor, ratios: Tensor, importance: Tensor | None, grid: Grid
) -> tuple[Tensor, Tensor | None]:
    """As reference.scale.group_scale."""
    library = native().library
    assert library is not None, "ops falls back to the reference"
    w = w if w.stride(-1) == 1 else w.contiguous()
    importance = None if importance is None else importance.contiguous()
    ratios = ratios.contiguous()
    scale = torch.empty(w.shape[0], dtype=torch.float32)
    zero = None if grid.symmetric else torch.empty(w.shape[0], dtype=torch.int8)
    block = Block(
        weight=w.data_ptr(),
        importance=address(importance),
        scale=scale.data_ptr(),
        zero=address(zero),
        rows=w.shape[0],
        width=w.shape[1],
        weight_stride=w.stride(0),
        group_stride=1,
        threads=torch.get_num_threads(),
    )
    library.group_scale(ctypes.byref(block), ctypes.byref(grid_struct(grid, ratios)))
    return scale, zero
