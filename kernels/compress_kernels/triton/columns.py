"""The column loop of one block in one launch; the specification is reference.columns.

A program owns a few rows and keeps their block, [rows, columns], in registers through the whole
loop; the form of the loop is that of `lazy`. Triton has no indexing into registers, so column i is
taken out by a masked sum, which costs no more than the update that follows it.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (Triton types the arguments of its kernels itself.)

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress_kernels.gptq import lazy
from compress_kernels.gptq.lazy import BlockTask
from compress_kernels.gptq.problem import ColumnResult, Problem
from compress_kernels.triton.grid import SCALE_KINDS, candidate, nearest, squared_error
from compress_kernels.triton.scale import group_scale

ROWS = 8
WARPS = 4


@triton.jit
def take(x, at):
    """Column of x [R, C] where `at` [C] is true (one place)."""
    return tl.sum(tl.where(at[None, :], x, 0.0), 1)


@triton.jit
def add_outer(total, x, r):
    """total [R, C] + x [R] outer r [C]."""
    return tl.fma(x[:, None] + tl.zeros_like(total), r[None, :] + tl.zeros_like(total), total)


@triton.jit
def update_group(weight, pull, factor, width, first, last, COLUMNS: tl.constexpr):
    """weight + pull R⁻¹ in columns [first, last): the optimum a scale search looks at."""
    column = tl.arange(0, COLUMNS)
    updated = pull
    for i in range(first, last):
        r = tl.load(factor + i * width + column, mask=(column >= i) & (column < last), other=0.0)
        x = take(updated, column == i) / tl.sum(tl.where(column == i, r, 0.0), 0)
        updated = tl.where(column[None, :] == i, x[:, None], add_outer(updated, -x, r))
    inside = (column >= first) & (column < last)
    return tl.where(inside[None, :], weight + updated, 0.0)


@triton.jit
def search(
    w, importance, ratios, ratio_count, code_min, code_max,
    SYMMETRIC: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Scale and zero [R] with the least error of w [R, C]; importance [C] is 0 outside a group."""
    low = tl.minimum(tl.min(w, 1), 0.0)
    high = tl.maximum(tl.max(w, 1), 0.0)
    best, best_zero = candidate(low, high, tl.load(ratios), code_min, code_max, SYMMETRIC, KIND)
    best_loss = tl.zeros_like(low) + float("inf")
    for i in range(ratio_count):
        s, z = candidate(low, high, tl.load(ratios + i), code_min, code_max, SYMMETRIC, KIND)
        loss = tl.sum(squared_error(w, s, z, code_min, code_max) * importance[None, :], 1)
        better = loss < best_loss
        best = tl.where(better, s, best)
        best_zero = tl.where(better, z, best_zero)
        best_loss = tl.where(better, loss, best_loss)
    return best, best_zero


@triton.jit
def block_kernel(
    weight, factor, importance, ratios, groups, scale, zero, codes, quantized, lost,
    rows, width, weight_stride, weight_step, group_stride, out_stride,
    ratio_count, code_min, code_max,
    SEARCH: tl.constexpr, PULLED: tl.constexpr, SYMMETRIC: tl.constexpr, WEIGHTED: tl.constexpr,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    valid = row < rows
    inside = valid[:, None] & (column < width)[None, :]
    out = row[:, None] * out_stride + column[None, :]
    w = tl.load(weight + row[:, None] * weight_stride + column[None, :] * weight_step,
                mask=inside, other=0.0)  # fmt: skip
    pull = tl.zeros([ROWS, COLUMNS], tl.float32)
    if PULLED:
        pull = tl.load(quantized + out, mask=inside, other=0.0)
    group_of = tl.load(groups + column, mask=column < width, other=-1)
    weighing = (column < width).to(tl.float32)
    if WEIGHTED:
        weighing = tl.load(importance + column, mask=column < width, other=0.0)
    code = tl.zeros([ROWS, COLUMNS], tl.float32)
    s = tl.zeros([ROWS], tl.float32) + 1.0
    z = tl.zeros([ROWS], tl.float32)
    previous = -1
    for i in range(width):
        group = tl.load(groups + i)
        if group != previous:
            at = row * group_stride + group
            if SEARCH:
                last = i + tl.sum((group_of == group).to(tl.int32), 0)
                updated = update_group(w, pull, factor, width, i, last, COLUMNS)
                importances = tl.where(group_of == group, weighing, 0.0)
                s, z = search(
                    updated, importances, ratios, ratio_count, code_min, code_max, SYMMETRIC, KIND
                )
                tl.store(scale + at, s, mask=valid)
                if not SYMMETRIC:
                    tl.store(zero + at, z.to(tl.int8), mask=valid)
            else:
                s = tl.load(scale + at, mask=valid, other=1.0)
                if not SYMMETRIC:
                    z = tl.load(zero + at, mask=valid, other=0).to(tl.float32)
        previous = group
        here = column == i
        r = tl.load(factor + i * width + column, mask=(column >= i) & (column < width), other=0.0)
        x = take(w, here)
        updated_x = x + take(pull, here) / tl.sum(tl.where(here, r, 0.0), 0)
        q = tl.minimum(tl.maximum(tl.div_rn(updated_x, s), code_min - z), code_max - z)
        q = nearest(q)
        value = q * s
        gone = x - value
        pull = tl.where(here[None, :], value[:, None], add_outer(pull, gone, r))
        w = tl.where(here[None, :], gone[:, None], w)
        code = tl.where(here[None, :], (q + z)[:, None], code)
    tl.store(quantized + out, pull, mask=inside)
    tl.store(codes + out, code.to(tl.int8), mask=inside)
    tl.store(lost + row[:, None] * width + column[None, :], w, mask=inside)


def gptq_columns(weight: Tensor, factor: Tensor, problem: Problem) -> ColumnResult:
    """As reference.columns.gptq_columns: two launches a block, this kernel and a matrix product."""
    return lazy.gptq_columns(weight, factor, problem, _solve_block, group_scale)


def _solve_block(task: BlockTask) -> Tensor:
    problem, result, weight = task.problem, task.result, task.weight
    grid = problem.grid
    columns = slice(task.start, task.stop)
    rows, width = weight.shape
    lost = torch.empty((rows, width), dtype=torch.float32, device=weight.device)
    importance = None if problem.importance is None else problem.importance[columns]
    block_kernel[(triton.cdiv(rows, ROWS),)](
        weight, task.factor.contiguous(), weight if importance is None else importance,
        problem.ratios, problem.groups[columns], result.scale,
        result.scale if result.zero is None else result.zero,
        result.codes[:, columns], result.quantized[:, columns], lost,
        rows, width, weight.stride(0), weight.stride(1), result.scale.stride(0),
        result.codes.stride(0), problem.ratios.numel(), float(grid.code_min), float(grid.code_max),
        SEARCH=task.search, PULLED=task.start > 0, SYMMETRIC=grid.symmetric,
        WEIGHTED=importance is not None, KIND=SCALE_KINDS[grid.scale_dtype],
        ROWS=ROWS, COLUMNS=triton.next_power_of_2(width), num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return lost
