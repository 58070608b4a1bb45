"""The column loop of one block by csrc/columns.cpp; the specification is reference.columns."""

import ctypes

import torch
from torch import Tensor

from compress_kernels.cpu.library import Block, address, grid_struct, native
from compress_kernels.cpu.scale import group_scale
from compress_kernels.gptq import lazy
from compress_kernels.gptq.lazy import BlockTask
from compress_kernels.gptq.problem import ColumnResult, Problem


def gptq_columns(weight: Tensor, factor: Tensor, problem: Problem) -> ColumnResult:
    """As reference.columns.gptq_columns."""
    return lazy.gptq_columns(weight, factor, problem, _solve_block, group_scale)


def _solve_block(task: BlockTask) -> Tensor:
    library = native().library
    assert library is not None, "ops falls back to the reference"
    problem, result = task.problem, task.result
    columns = slice(task.start, task.stop)
    weight = task.weight if task.weight.stride(-1) == 1 else task.weight.contiguous()
    factor = task.factor.contiguous()
    lost = torch.empty(weight.shape, dtype=torch.float32)
    importance = None if problem.importance is None else problem.importance[columns]
    block = Block(
        weight=weight.data_ptr(),
        factor=factor.data_ptr(),
        importance=address(importance),
        groups=problem.groups[columns].data_ptr(),
        scale=result.scale.data_ptr(),
        zero=address(result.zero),
        codes=result.codes[:, columns].data_ptr(),
        quantized=result.quantized[:, columns].data_ptr(),
        lost=lost.data_ptr(),
        rows=weight.shape[0],
        width=weight.shape[1],
        weight_stride=weight.stride(0),
        group_stride=result.scale.stride(0),
        out_stride=result.codes.stride(0),
        search=int(task.search),
        pulled=int(task.start > 0),
        threads=torch.get_num_threads(),
    )
    library.gptq_block(ctypes.byref(block), ctypes.byref(grid_struct(problem.grid, problem.ratios)))
    return lost
