"""The lazy-batch column loop around a compiled block kernel.

The same result as `reference.columns` with less dense algebra. Let D = W - Q be
what the columns P rounded so far have lost, and H = R Rᵀ, R upper triangular. GPTQ keeps the later
columns F at their optimum (eq. 2 in block form):

    W_F + D_P H_PF H_FF⁻¹ = W_F + A R_FF⁻¹   with the pull A = D_P R_PF.

R_FF is upper triangular, so the next column j is W_j + A_j / R_jj: rounding it needs no inverse
(QuIP, arXiv 2307.13304, theorem 6, proves this case), and the next group g, which a scale search
looks at as a whole, is W_g + A_g R_gg⁻¹: a small triangular solve. A is summed up with the very
matrix products that Algorithm 1 spends on its lazy updates. The K x K inverse and its Cholesky
factor are never formed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compress_kernels.gptq.problem import ColumnResult, Grid, Problem, empty_result


@dataclass(frozen=True, slots=True, eq=False)
class BlockTask:
    """Columns [start, stop) of a loop.

    weight: fp32 [N, B], as given to the loop. factor: fp32 [B, B], the diagonal block of R.
    search: choose scales where a group starts; otherwise `result` already holds them.
    `result.quantized` holds the pull A of earlier blocks in these columns (undefined where start
    is 0: there is none). The kernel replaces it with the quantized weights, writes the codes (and
    scale, zero) and returns what was lost, weight - quantized: fp32 [N, B].
    """

    start: int
    stop: int
    weight: Tensor
    factor: Tensor
    search: bool
    problem: Problem
    result: ColumnResult


SolveBlock = Callable[[BlockTask], Tensor]
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
    work = result.quantized  # left of the border Q, right of it A
    wide = problem.scale is None and problem.group_size > problem.block
    for start, stop in problem.borders():
        if wide and start % problem.group_size == 0:
            _choose_wide_scale(weight, factor, start, problem, result, group_scale)
        block = slice(start, stop)
        search = problem.scale is None and not wide
        task = BlockTask(
            start, stop, weight[:, block], factor[block, block], search, problem, result
        )
        lost = solve_block(task)
        if stop < weight.shape[1]:
            work[:, stop:].addmm_(lost, factor[block, stop:], beta=1 if start else 0)
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
