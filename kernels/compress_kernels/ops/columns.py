"""Public ops: arguments checked, then one implementation by device."""

import torch
from torch import Tensor

from compress_kernels.cpu import columns as cpu_columns
from compress_kernels.cpu.library import native
from compress_kernels.gptq.problem import ColumnResult, FixedScales, Grid, Problem, SearchedScales
from compress_kernels.ops.checks import has_triton, ratios_of, require, require_grid, require_matrix
from compress_kernels.reference import columns as reference_columns


def gptq_columns(
    weight: Tensor,
    factor: Tensor,
    grid: Grid,
    group_size: int,
    scales: SearchedScales | FixedScales,
    block: int = 128,
) -> ColumnResult:
    """GPTQ's column loop: round each column, make up for its error in all later ones.

    weight: fp32 [N, K], not modified. factor: hessian_factor(H), fp32 [K, K] upper triangular.
    grid: of the codes. group_size: columns that share a scale; the last group may be short. scales:
    chosen on the way, or given. block: columns between two updates of all later ones; no effect on
    the result but for fp32 rounding.
    Raises ValueError on a wrong shape, dtype or range.
    """
    require_grid(grid)
    _check_operands(weight, factor)
    require(group_size >= 1, "group_size", str(group_size), "1 or more")
    require(block >= 1, "block", str(block), "1 or more")
    return _solve(weight, factor, _problem(weight, grid, group_size, scales, block))


def _problem(
    weight: Tensor, grid: Grid, group_size: int, scales: SearchedScales | FixedScales, block: int
) -> Problem:
    """With the scales checked, and the group of every column."""
    columns, device = weight.shape[1], weight.device
    size = min(group_size, columns)
    groups = torch.arange(columns, device=device) // group_size
    if isinstance(scales, SearchedScales):
        importance = _importance(scales, columns, device)
        ratios = ratios_of(scales.ratios, grid.symmetric, device)
        groups = groups.to(torch.int32)
        return Problem(grid, size, ratios, importance, None, None, groups, block)
    _check_fixed(scales, weight, grid)
    groups = _groups(groups if scales.groups is None else scales.groups, columns, scales.scale)
    unread = torch.ones(1, dtype=torch.float32, device=device)  # as nothing is searched
    return Problem(grid, size, unread, None, scales.scale, scales.zero, groups, block)


def _importance(scales: SearchedScales, columns: int, device: torch.device) -> Tensor | None:
    importance = scales.importance
    if importance is None:
        return None
    require_matrix("importance", importance, (columns,), torch.float32, device)
    return importance.contiguous()


def _solve(weight: Tensor, factor: Tensor, problem: Problem) -> ColumnResult:
    if weight.is_cuda and has_triton():
        from compress_kernels.triton import columns as triton_columns

        with torch.cuda.device(weight.device):
            return triton_columns.gptq_columns(weight, factor, problem)
    if weight.device.type == "cpu" and native().library is not None:
        return cpu_columns.gptq_columns(weight, factor, problem)
    return reference_columns.gptq_columns(weight, factor, problem)


def _check_operands(weight: Tensor, factor: Tensor) -> None:
    right = weight.dim() == 2 and weight.numel() > 0
    require(right, "weight", f"shape {list(weight.shape)}", "[N, K], not empty")
    rows, columns = weight.shape
    require_matrix("weight", weight, (rows, columns), torch.float32, weight.device)
    require_matrix("factor", factor, (columns, columns), torch.float32, weight.device)


def _check_fixed(fixed: FixedScales, weight: Tensor, grid: Grid) -> None:
    scale, zero, rows, device = fixed.scale, fixed.zero, weight.shape[0], weight.device
    right = scale.dim() == 2 and scale.shape[0] == rows and scale.shape[1] > 0
    require(right, "scale", f"shape {list(scale.shape)}", f"[{rows}, groups]")
    require_matrix("scale", scale, (rows, scale.shape[1]), torch.float32, device)
    exact = torch.equal(scale, scale.to(grid.scale_dtype).float())
    require(exact, "scale", f"not exact in {grid.scale_dtype}", "a scale rounded to it")
    require((zero is None) == grid.symmetric, "zero", "missing" if zero is None else "given",
           "a zero for asymmetric codes, none for symmetric ones,")  # fmt: skip
    if zero is not None:
        require_matrix("zero", zero, (rows, scale.shape[1]), torch.int8, device)


def _groups(groups: Tensor, columns: int, scale: Tensor) -> Tensor:
    """The scale of each column: int32 [K]."""
    require_matrix("groups", groups, (columns,), groups.dtype, scale.device)
    require(not groups.is_floating_point(), "groups", f"{groups.dtype}", "an integer dtype")
    low, high, count = int(groups.min()), int(groups.max()), scale.shape[1]
    require(low >= 0 and high < count, "groups", f"in [{low}, {high}]", f"[0, {count - 1}]")
    return groups.to(torch.int32).contiguous()
