"""The lazy-batch column loop around a compiled block kernel.

The same result as `reference.columns`, with less dense algebra. Let D = W - Q be what the rounded
columns lost, P the columns rounded so far, and H = R Rᵀ. GPTQ keeps the later columns F at their
optimum, W_F + D_P R_PF R_FF⁻¹ (the normal equations of eq. 1 in block form; QuIP, arXiv 2307.13304,
theorem 6, states the case of one column). R_FF is upper triangular, so for the next block b only
its own diagonal block counts: W_b + (D_P R_Pb) R_bb⁻¹. The product D_P R_PF is summed up block by
block with the same matrix product that Algorithm 1 spends on its updates, and inside a block U is
R_bb⁻¹. The K x K inverse is never formed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compress_kernels.factor import inverse_upper
from compress_kernels.grid import ColumnResult, Grid, Problem, empty_result


@dataclass(frozen=True, slots=True, eq=False)
class BlockTask:
    """Columns [start, stop) of a loop.

    weight: fp32 [N, B], updated by all earlier blocks, rows any stride. upper: fp32 [B, B].
    search: choose scales where a group starts; otherwise `result` already holds them.
    The kernel writes codes, quantized (and scale, zero) of `result` in place.
    """

    start: int
    stop: int
    weight: Tensor
    upper: Tensor
    search: bool
    problem: Problem
    result: ColumnResult


SolveBlock = Callable[[BlockTask], None]
GroupScale = Callable[[Tensor, Tensor, Tensor | None, Grid], tuple[Tensor, Tensor | None]]


def gptq_columns(
    weight: Tensor,
    factor: Tensor,
    problem: Problem,
    solve_block: SolveBlock,
    group_scale: GroupScale,
) -> ColumnResult:
    """As reference.columns.gptq_columns."""
    result = empty_result(weight, problem)
    work = result.quantized  # left of the border Q, right of it D_P R_PF
    wide = problem.scale is None and problem.group_size > problem.block
    for start, stop in problem.borders():
        block = slice(start, stop)
        if wide and start % problem.group_size == 0:
            _choose_wide_scale(weight, factor, start, problem, result, group_scale)
        upper = inverse_upper(factor[block, block])
        updated = weight[:, block]
        if start:
            updated = torch.addmm(updated, work[:, block], upper)
        search = problem.scale is None and not wide
        solve_block(BlockTask(start, stop, updated, upper, search, problem, result))
        if stop < weight.shape[1]:
            lost = weight[:, block] - work[:, block]
            work[:, stop:].addmm_(lost, factor[block, stop:])
    return result


def _choose_wide_scale(
    weight: Tensor,
    factor: Tensor,
    start: int,
    problem: Problem,
    result: ColumnResult,
    group_scale: GroupScale,
) -> None:
    """Scale of a group that spans several blocks, from the weights as updated at its start."""
    columns = slice(start, min(start + problem.group_size, weight.shape[1]))
    updated = weight[:, columns]
    if start:
        pull = result.quantized[:, columns]
        triangle = factor[columns, columns]
        updated = updated + torch.linalg.solve_triangular(triangle, pull, upper=True, left=False)
    importance = None if problem.importance is None else problem.importance[columns]
    scale, zero = group_scale(updated, problem.ratios, importance, problem.grid)
    group = start // problem.group_size
    result.scale[:, group] = scale
    if result.zero is not None and zero is not None:
        result.zero[:, group] = zero
