"""Public ops: arguments checked, then one implementation by device."""

import importlib.util

import torch
from torch import Tensor

from compress_kernels.cpu import columns as cpu_columns
from compress_kernels.cpu import gram as cpu_gram
from compress_kernels.cpu import scale as cpu_scale
from compress_kernels.cpu.library import SCALE_KINDS, native
from compress_kernels.grid import ColumnResult, Grid, Problem
from compress_kernels.reference import columns as reference_columns
from compress_kernels.reference import gram as reference_gram
from compress_kernels.reference import scale as reference_scale

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def gram_(x: Tensor, out: Tensor) -> None:
    """Add xᵀx to `out` in place, every product exact and every sum in fp32.

    x: [tokens, K] bf16, fp16 or fp32. out: fp32 [K, K], contiguous and symmetric (start from
    zeros: the lower triangle is copied from the upper one). Raises ValueError on anything else.
    """
    _check(x.dim() == 2, "x", f"shape {list(x.shape)}", "[tokens, K]")
    _check(x.dtype in FLOATS, "x", f"{x.dtype}", "bf16, fp16 or fp32")
    _check_matrix("out", out, (x.shape[1], x.shape[1]), torch.float32, x.device)
    _check(out.is_contiguous(), "out", "not contiguous", "a contiguous tensor")
    if x.is_cuda and _has_triton():
        from compress_kernels.triton import gram as triton_gram

        with torch.cuda.device(x.device):  # Triton launches on the current one
            triton_gram.gram_(x, out)
    elif x.device.type == "cpu":
        cpu_gram.gram_(x, out)
    else:
        reference_gram.gram_(x, out)


def group_scale(
    w: Tensor,
    ratios: Tensor,
    importance: Tensor | None,
    bits: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Scale, and zero when asymmetric, of each row of w with the least weighted squared error.

    w: fp32 [N, g]. ratios: fp32 [R], shrinks of the min-max range to try, first wins ties; [1.0]
    is plain min-max, negative ones (symmetric only) give negative scales. importance: fp32 [g],
    weight of each column's squared error, or None.
    Returns fp32 [N], exact in scale_dtype (fp32, bf16, fp16), and int8 [N] or None. A row of
    zeros gets scale 1. Raises ValueError on a wrong shape, dtype or range.
    """
    grid = _grid(bits, symmetric, scale_dtype)
    _check(w.dim() == 2 and w.numel() > 0, "w", f"shape {list(w.shape)}", "[N, g], not empty")
    _check_matrix("w", w, (w.shape[0], w.shape[1]), torch.float32, w.device)
    ratios = _ratios(ratios, symmetric, w.device)
    if importance is not None:
        _check_matrix("importance", importance, (w.shape[1],), torch.float32, w.device)
    # The Triton kernel walks through a row alone: one row over all columns goes to torch.
    if w.is_cuda and _has_triton() and w.shape[0] > 1:
        from compress_kernels.triton import scale as triton_scale

        with torch.cuda.device(w.device):
            return triton_scale.group_scale(w, ratios, importance, grid)
    if w.device.type == "cpu" and native().library is not None:
        return cpu_scale.group_scale(w, ratios, importance, grid)
    return reference_scale.group_scale(w, ratios, importance, grid)


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
    grid = _grid(bits, symmetric, scale_dtype)
    rows, columns = _check_operands(weight, factor)
    _check(group_size >= 1, "group_size", str(group_size), "1 or more")
    _check(block >= 1, "block", str(block), "1 or more")
    if importance is not None:
        _check_matrix("importance", importance, (columns,), torch.float32, weight.device)
        importance = importance.contiguous()
    _check_fixed(scale, zero, groups, rows, grid, weight.device)
    if groups is None:
        groups = torch.arange(columns, device=weight.device) // group_size
    count = -(-columns // group_size) if scale is None else scale.shape[1]
    groups = _groups(groups, columns, count, weight.device)
    size = min(group_size, columns)
    ratios = _ratios(ratios, symmetric, weight.device)
    problem = Problem(grid, size, ratios, importance, scale, zero, groups, block)
    return _solve(weight, factor, problem)


def _solve(weight: Tensor, factor: Tensor, problem: Problem) -> ColumnResult:
    if weight.is_cuda and _has_triton():
        from compress_kernels.triton import columns as triton_columns

        with torch.cuda.device(weight.device):
            return triton_columns.gptq_columns(weight, factor, problem)
    if weight.device.type == "cpu" and native().library is not None:
        return cpu_columns.gptq_columns(weight, factor, problem)
    return reference_columns.gptq_columns(weight, factor, problem)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _check(right: bool, name: str, is_now: str, wanted: str) -> None:
    if not right:
        raise ValueError(f"{name} is {is_now}; {wanted} is needed")


def _check_matrix(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    _check(tuple(tensor.shape) == shape, name, f"shape {list(tensor.shape)}", f"{list(shape)}")
    _check(tensor.dtype == dtype, name, f"{tensor.dtype}", f"{dtype}")
    _check(tensor.device == device, name, f"on {tensor.device}", f"{device}")


def _check_operands(weight: Tensor, factor: Tensor) -> tuple[int, int]:
    right = weight.dim() == 2 and weight.numel() > 0
    _check(right, "weight", f"shape {list(weight.shape)}", "[N, K], not empty")
    rows, columns = weight.shape
    _check_matrix("weight", weight, (rows, columns), torch.float32, weight.device)
    _check_matrix("factor", factor, (columns, columns), torch.float32, weight.device)
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
        _check(zero is None, "zero", "given without scale", "both or neither")
        _check(groups is None, "groups", "given without scale", "both or neither")
        return
    right = scale.dim() == 2 and scale.shape[0] == rows and scale.shape[1] > 0
    _check(right, "scale", f"shape {list(scale.shape)}", f"[{rows}, groups]")
    _check_matrix("scale", scale, (rows, scale.shape[1]), torch.float32, device)
    exact = torch.equal(scale, scale.to(grid.scale_dtype).float())
    _check(exact, "scale", f"not exact in {grid.scale_dtype}", "a scale rounded to it")
    _check((zero is None) == grid.symmetric, "zero", "missing" if zero is None else "given",
           "a zero for asymmetric codes, none for symmetric ones,")  # fmt: skip
    if zero is not None:
        _check_matrix("zero", zero, (rows, scale.shape[1]), torch.int8, device)


def _groups(groups: Tensor, columns: int, count: int, device: torch.device) -> Tensor:
    _check_matrix("groups", groups, (columns,), groups.dtype, device)
    _check(not groups.is_floating_point(), "groups", f"{groups.dtype}", "an integer dtype")
    low, high = int(groups.min()), int(groups.max())
    _check(low >= 0 and high < count, "groups", f"in [{low}, {high}]", f"[0, {count - 1}]")
    return groups.to(torch.int32).contiguous()


def _grid(bits: int, symmetric: bool, scale_dtype: torch.dtype) -> Grid:
    _check(2 <= bits <= 8, "bits", str(bits), "2 to 8")
    _check(scale_dtype in SCALE_KINDS, "scale_dtype", f"{scale_dtype}", "fp32, bf16 or fp16")
    return Grid(bits, symmetric, scale_dtype)


def _ratios(ratios: Tensor, symmetric: bool, device: torch.device) -> Tensor:
    right = ratios.dim() == 1 and ratios.numel() > 0
    _check(right, "ratios", f"shape {list(ratios.shape)}", "[R], not empty,")
    if symmetric:
        nonzero = bool(((ratios != 0) & ratios.isfinite()).all())
        _check(nonzero, "ratios", f"{ratios.tolist()}", "values that are finite and not 0")
    else:
        positive = bool((ratios > 0).all())
        _check(positive, "ratios", f"{ratios.tolist()}", "positive values")
    return ratios.to(device, torch.float32).contiguous()
