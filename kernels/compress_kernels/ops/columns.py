"""Public ops: arguments checked, then one implementation by device."""

import torch
from torch import Tensor

from compress_kernels.cpu import columns as cpu_columns
from compress_kernels.cpu.library import native
from compress_kernels.gptq.problem import ColumnResult, Grid, Problem
from compress_kernels.ops.checks import grid_of, has_triton, ratios_of, require, require_matrix
from compress_kernels.reference import columns as reference_columns


def gptq_columns(
    weight: Tensor,
    factor: Tensor,
    *,
    bits: int,
    symmetric: bool,
    group_size: int,
    ratios: Tensor,
    scale_dtype: torch.dtype,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    groups: Tensor | None = None,
    importance: Tensor | None = None,
    block: int = 128,
) -> ColumnResult:
    """GPTQ's column loop: round each column, make up for its error in all later ones.

    weight: fp32 [N, K], not modified. factor: hessian_factor(H), fp32 [K, K] upper triangular.
    scale None: each group's scale is chosen by `group_scale` (ratios, importance fp32 [K]) from
    the weights as updated when the loop reaches the group. scale fp32 [N, G] with zero int8
    [N, G] (asymmetric only): fixed up front; groups int32 [K] names each column's scale
    (act-order), None for k // group_size. The last group may be short. block: columns between two
    updates of all later ones; no effect on the result but for fp32 rounding.
    Raises ValueError on a wrong shape, dtype or range.
    """
    grid = grid_of(bits, symmetric, scale_dtype)
    rows, columns = _check_operands(weight, factor)
    require(group_size >= 1, "group_size", str(group_size), "1 or more")
    require(block >= 1, "block", str(block), "1 or more")
    if importance is not None:
        require_matrix("importance", importance, (columns,), torch.float32, weight.device)
        importance = importance.contiguous()
    _check_fixed(scale, zero, groups, rows, grid, weight.device)
    if groups is None:
        groups = torch.arange(columns, device=weight.device) // group_size
    count = -(-columns // group_size) if scale is None else scale.shape[1]
    groups = _groups(groups, columns, count, weight.device)
    size = min(group_size, columns)
    ratios = ratios_of(ratios, symmetric, weight.device)
    problem = Problem(grid, size, ratios, importance, scale, zero, groups, block)
    return _solve(weight, factor, problem)


def _solve(weight: Tensor, factor: Tensor, problem: Problem) -> ColumnResult:
    if weight.is_cuda and has_triton():
        from compress_kernels.triton import columns as triton_columns

        with torch.cuda.device(weight.device):
            return triton_columns.gptq_columns(weight, factor, problem)
    if weight.device.type == "cpu" and native().library is not None:
        return cpu_columns.gptq_columns(weight, factor, problem)
    return reference_columns.gptq_columns(weight, factor, problem)


def _check_operands(weight: Tensor, factor: Tensor) -> tuple[int, int]:
    right = weight.dim() == 2 and weight.numel() > 0
    require(right, "weight", f"shape {list(weight.shape)}", "[N, K], not empty")
    rows, columns = weight.shape
    require_matrix("weight", weight, (rows, columns), torch.float32, weight.device)
    require_matrix("factor", factor, (columns, columns), torch.float32, weight.device)
    return rows, columns


def _check_fixed(
    scale: Tensor | None,
    zero: Tensor | None,
    groups: Tensor | None,
    rows: int,
    grid: Grid,
    device: torch.device,
) -> None:
    """Scales fixed up front come as a whole, or not at all."""
    if scale is None:
        require(zero is None, "zero", "given without scale", "both or neither")
        require(groups is None, "groups", "given without scale", "both or neither")
        return
    right = scale.dim() == 2 and scale.shape[0] == rows and scale.shape[1] > 0
    require(right, "scale", f"shape {list(scale.shape)}", f"[{rows}, groups]")
    require_matrix("scale", scale, (rows, scale.shape[1]), torch.float32, device)
    exact = torch.equal(scale, scale.to(grid.scale_dtype).float())
    require(exact, "scale", f"not exact in {grid.scale_dtype}", "a scale rounded to it")
    require((zero is None) == grid.symmetric, "zero", "missing" if zero is None else "given",
           "a zero for asymmetric codes, none for symmetric ones,")  # fmt: skip
    if zero is not None:
        require_matrix("zero", zero, (rows, scale.shape[1]), torch.int8, device)


def _groups(groups: Tensor, columns: int, count: int, device: torch.device) -> Tensor:
    require_matrix("groups", groups, (columns,), groups.dtype, device)
    require(not groups.is_floating_point(), "groups", f"{groups.dtype}", "an integer dtype")
    low, high = int(groups.min()), int(groups.max())
    require(low >= 0 and high < count, "groups", f"in [{low}, {high}]", f"[0, {count - 1}]")
    return groups.to(torch.int32).contiguous()
