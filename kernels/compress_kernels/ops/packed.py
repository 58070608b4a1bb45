"""Rows times a weight whose codes lie in panels, decoded or as whole numbers."""

import torch
from torch import Tensor

from compress_kernels.cpu import packed as cpu_packed
from compress_kernels.cpu.library import native
from compress_kernels.ops.checks import require, require_matrix, require_whole, wrong
from compress_kernels.ops.pairs import compiled_pairs
from compress_kernels.panels import PANEL, RUN, Layout, Math, Panels, panel_bytes
from compress_kernels.reference import packed as reference
from compress_kernels.rounding import FloatRounding, RowRounding

BITS = {"e2m1": 4, "e4m3": 8}
MOST = 1 << 16  # columns whose products of 8 bits have a sum of 32


def layout_for(math: Math) -> Layout:
    """The panels that a math reads: one layout for both would cost either a third of its speed."""
    return "rows" if math == "exact" else "dots"


def takes_group(group: int, columns: int) -> bool:
    """Whether so many columns may share a scale: they are multiples of 16, runs of 128 at most
    never have two scales, and a row may have one scale."""
    return group >= columns or (group % 16 == 0 and (group <= RUN or group % RUN == 0))


def packed_linear(
    x: Tensor,
    panels: Panels,
    bias: Tensor | None,
    math: Math,
    rounding: RowRounding | FloatRounding | None = None,
) -> Tensor:
    """x fp32 [M, K], bias fp32 [N] or None -> fp32 [M, N], on the CPU; all in bf16 under "exact".

    "exact" gives the bits of linear.linear with the decoded weight, in x's dtype. "int16" and
    "int8" round each row of x to whole numbers, of 32512 and of 127 at most, a group of the weight
    at a time (128 columns at most), and multiply these with codes: sums of a run are exact, and
    runs are added in the order of columns, one fma each. So a row's bits depend on nothing else,
    and are the same on every instruction set; a run with NaN or infinity makes its row NaN. E2M1
    codes take twice their numbers and half of their scale.
    rounding: of rows, in place of the math's, under "int16" and "int8" alike: sums are those of a
    group of the weight, however long; what it leaves as it is follows in the order of columns, one
    fma each. E4M3 codes have "exact", and these two with a FloatRounding: sums are in fp32 then,
    of columns that share a scale of the weight and of the row, in one order (float_dots.cpp).
    Raises ValueError on a wrong shape or dtype, and for panels that are laid out for another math.
    """
    require(rounding is None or math != "exact", "rounding", "given", "None for exact")
    _check(panels, math)
    _check_floats(panels, math, rounding)
    require(
        not isinstance(rounding, RowRounding) or panels.shape[1] <= MOST,
        "columns",
        "more",
        f"{MOST} at most",
    )
    n, k = panels.shape
    half = math == "exact" and x.dtype == torch.bfloat16
    if x.dim() != 2 or x.shape[1] != k or not (half or x.dtype == torch.float32):
        raise wrong("x", x, f"torch.float32 [rows, {k}]")
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype):
        raise wrong("bias", bias, f"{x.dtype} [{n}]")
    here = compiled_pairs(x.device) if half else native().library is not None
    if not here or x.numel() == 0 or n == 0:
        return reference.packed_linear(x, panels, bias, math, rounding)
    return cpu_packed.packed_linear(x, panels, bias, math, rounding)


def takes_groups(group: int, input_group: int, columns: int) -> bool:
    """Whether columns that share a scale of a weight of floats, and of its inputs (0: all), are
    runs: one of both is a part of the other."""
    if input_group % 16:
        return False
    small, large = sorted((group, input_group or columns))
    return large >= columns or large % small == 0


def _check_floats(panels: Panels, math: Math, rounding: RowRounding | FloatRounding | None) -> None:
    if panels.kind == "e4m3" and math != "exact" and rounding is None:
        raise ValueError(
            f"codes are E4M3 numbers, which {math} reads for inputs that are rounded to such;"
            " exact is needed"
        )
    if isinstance(rounding, RowRounding):
        require(panels.kind != "e4m3", "rounding", "of whole numbers", "FloatRounding for E4M3")
    elif rounding is not None:
        require(panels.kind == "e4m3", "codes", panels.kind, "e4m3 for inputs of E4M3")
        fits = takes_groups(panels.group, rounding.group, panels.shape[1])
        wanted = f"a part or a multiple of {panels.group}"
        require(fits, "rounding.group", str(rounding.group), wanted)


def _check(panels: Panels, math: Math) -> None:
    """Compiled code reads memory by these alone."""
    wanted, (n, k) = layout_for(math), panels.shape
    if panels.layout != wanted:
        raise ValueError(f"panels are laid out as {panels.layout!r}; {math} reads {wanted!r}")
    bytes_, scales = panel_bytes(k, panels.bits, panels.layout), panels.scales
    count = -(-n // PANEL)
    if panels.codes.numel() != count * bytes_ or panels.codes.dtype != torch.uint8:
        raise wrong("codes", panels.codes, f"torch.uint8 of {count} times {bytes_}")
    groups = -(-k // panels.group)
    shapes = ((count, groups, PANEL), (count, groups, 1))
    if scales.shape not in shapes or scales.dtype not in cpu_packed.PACKED_KINDS:
        raise wrong("scales", scales, f"fp32, bf16, fp16 or E4M3 {[count, groups, PANEL]}")
    if panels.kind != "int":
        require(panels.bits == BITS[panels.kind], "bits", str(panels.bits), str(BITS[panels.kind]))
    require(takes_group(panels.group, k), "group", str(panels.group), "16, 32, 64 or 128 times n")
    if panels.zeros is not None:
        require_matrix("zeros", panels.zeros, shapes[0], torch.int8, scales.device)
    if panels.columns is not None:
        require_matrix("columns", panels.columns, (k,), torch.int32, scales.device)
    for name in ("codes", "scales", "zeros", "columns"):
        require_whole(name, getattr(panels, name))
