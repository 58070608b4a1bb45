"""Group scales, one launch for all rows; the specification is reference.scale."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (Triton types the arguments of its kernels itself.)

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress_kernels.gptq.problem import Grid
from compress_kernels.triton.grid import SCALE_KINDS, candidate, squared_error

ROWS = 4
COLUMNS = 256


@triton.jit
def scale_kernel(
    w, ratios, importance, scale, zero,
    rows, width, row_stride, column_stride, ratio_count, code_min, code_max,
    SYMMETRIC: tl.constexpr, WEIGHTED: tl.constexpr, KIND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    start = w + row.to(tl.int64)[:, None] * row_stride
    low = tl.zeros([ROWS], tl.float32)
    high = tl.zeros([ROWS], tl.float32)
    for first in range(0, width, COLUMNS):
        c = first + column
        inside = (row < rows)[:, None] & (c < width)[None, :]
        x = tl.load(start + c[None, :].to(tl.int64) * column_stride, mask=inside, other=0.0)
        low = tl.minimum(low, tl.min(x, 1))
        high = tl.maximum(high, tl.max(x, 1))
    best, best_zero = candidate(low, high, tl.load(ratios), code_min, code_max, SYMMETRIC, KIND)
    best_loss = tl.zeros([ROWS], tl.float32) + float("inf")
    for i in range(ratio_count):
        s, z = candidate(low, high, tl.load(ratios + i), code_min, code_max, SYMMETRIC, KIND)
        loss = tl.zeros([ROWS], tl.float32)
        for first in range(0, width, COLUMNS):
            c = first + column
            inside = (row < rows)[:, None] & (c < width)[None, :]
            x = tl.load(start + c[None, :].to(tl.int64) * column_stride, mask=inside, other=0.0)
            error = squared_error(x, s, z, code_min, code_max)
            if WEIGHTED:
                error *= tl.load(importance + c, mask=c < width, other=0.0)[None, :]
            loss += tl.sum(error, 1)
        better = loss < best_loss
        best = tl.where(better, s, best)
        best_zero = tl.where(better, z, best_zero)
        best_loss = tl.where(better, loss, best_loss)
    tl.store(scale + row, best, mask=row < rows)
    if not SYMMETRIC:
        tl.store(zero + row, best_zero.to(tl.int8), mask=row < rows)


def group_scale(
    w: Tensor, ratios: Tensor, importance: Tensor | None, grid: Grid
) -> tuple[Tensor, Tensor | None]:
    """As reference.scale.group_scale."""
    rows, width = w.shape
    scale = torch.empty(rows, dtype=torch.float32, device=w.device)
    zero = None if grid.symmetric else torch.empty(rows, dtype=torch.int8, device=w.device)
    scale_kernel[(triton.cdiv(rows, ROWS),)](
        w, ratios, importance if importance is not None else w, scale,
        zero if zero is not None else scale,
        rows, width, w.stride(0), w.stride(1), ratios.numel(),
        float(grid.code_min), float(grid.code_max),
        SYMMETRIC=grid.symmetric, WEIGHTED=importance is not None,
        KIND=SCALE_KINDS[grid.scale_dtype], ROWS=ROWS, COLUMNS=COLUMNS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return scale, zero
