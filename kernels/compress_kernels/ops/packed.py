"""Rows times a weight whose codes lie in panels, decoded or as whole numbers."""

import torch
from torch import Tensor

from compress_kernels.cpu import packed as cpu_packed
from compress_kernels.cpu.library import native
from compress_kernels.ops.checks import require, require_matrix, require_whole, wrong
from compress_kernels.ops.linear import widened
from compress_kernels.ops.pairs import compiled_pairs
from compress_kernels.panels import NUMBERS, PANEL, RUN, Layout, Math, Panels, panel_bytes
from compress_kernels.reference import packed as reference
from compress_kernels.rounding import FloatRounding, RowRounding

BITS = {"e2m1": 4, "e4m3": 8, "iq4": 4}
MINIMA = (torch.float16, torch.int8)
MOST = 1 << 16  # columns whose products of 8 bits have a sum of 32


def layout_for(math: Math, dtype: torch.dtype = torch.float32) -> Layout:
    """The panels that a math reads for rows of a dtype: one layout for all would cost each of them
    a third of its speed."""
    return "rows" if math == "exact" and dtype != torch.bfloat16 else "dots"


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
    """x fp32 [M, K], bias fp32 [N] or None -> fp32 [M, N], on the CPU; all in bf16 or fp16 under
    "exact".

    "exact" gives the bits of linear.linear with the decoded weight, in x's dtype; those of fp16 are
    fp32's, rounded once, the decoded weight not rounded to fp16. "int16" and
    "int8" round each row of x to whole numbers, of 32512 and of 127 at most, a group of the weight
    at a time (128 columns at most), and multiply these with codes: sums of a run are exact, and
    runs are added in the order of columns, one fma each; a minimum is one more, times the whole sum
    of the run's inputs. So a row's bits depend on nothing else, and are the same on every
    instruction set; a run with NaN or infinity makes its row NaN. E2M1 codes take twice their
    numbers and half of their scale.
    rounding: of rows, in place of the math's, under "int16" and "int8" alike: sums are those of a
    group of the weight, however long; what it leaves as it is follows in the order of columns, one
    fma each. E4M3 codes have "exact", and these two with a FloatRounding: sums are in fp32 then,
    of columns that share a scale of the weight and of the row, in one order (float_dots.cpp).
    Raises ValueError on a wrong shape or dtype, and for panels that are laid out for another math.
    """
    require(rounding is None or math != "exact", "rounding", "given", "None for exact")
    _check(panels, math, x.dtype)
    _check_rounding(panels, math, rounding)
    n, k = panels.shape
    half = math == "exact" and x.dtype == torch.bfloat16
    narrow = math == "exact" and x.dtype == torch.float16
    if x.dim() != 2 or x.shape[1] != k or not (half or narrow or x.dtype == torch.float32):
        more = ", torch.bfloat16 or torch.float16" if math == "exact" else ""
        raise wrong("x", x, f"torch.float32{more} [rows, {k}]")
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype):
        raise wrong("bias", bias, f"{x.dtype} [{n}]")
    if narrow:  # these processors have no dot of fp16
        return packed_linear(x.float(), panels, widened(bias), math).to(x.dtype)
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


def _check_rounding(
    panels: Panels, math: Math, rounding: RowRounding | FloatRounding | None
) -> None:
    """What rows become, for codes of a kind."""
    kind, (_, columns) = panels.kind, panels.shape
    if kind == "e4m3" and math != "exact" and rounding is None:
        raise ValueError(
            f"codes are E4M3 numbers, which {math} reads for inputs that are rounded to such;"
            " exact is needed"
        )
    if isinstance(rounding, RowRounding):
        require(kind != "e4m3", "rounding", "of whole numbers", "FloatRounding for E4M3")
        require(kind in ("int", "e2m1"), "rounding", "given", f"None for codes {kind}")
        require(columns <= MOST, "columns", "more", f"{MOST} at most")
    elif rounding is not None:
        require(kind == "e4m3", "codes", kind, "e4m3 for inputs of E4M3")
        fits = takes_groups(panels.group, rounding.group, columns)
        wanted = f"a part or a multiple of {panels.group}"
        require(fits, "rounding.group", str(rounding.group), wanted)


def _check(panels: Panels, math: Math, dtype: torch.dtype) -> None:
    """Compiled code reads memory by these alone."""
    wanted, (n, k) = layout_for(math, dtype), panels.shape
    if panels.layout != wanted:
        raise ValueError(f"panels are laid out as {panels.layout!r}; {math} reads {wanted!r}")
    _check_own(panels, dtype)
    bytes_, scales = panel_bytes(k, panels.bits, panels.layout), panels.scales
    count = -(-n // PANEL)
    if panels.codes.numel() != count * bytes_ or panels.codes.dtype != torch.uint8:
        raise wrong("codes", panels.codes, f"torch.uint8 of {count} times {bytes_}")
    groups = -(-k // panels.group)
    shapes = ((count, groups, PANEL), (count, groups, 1))
    if scales.shape not in shapes or scales.dtype not in cpu_packed.PACKED_KINDS:
        raise wrong("scales", scales, f"fp32, bf16, fp16, E4M3 or int8 {[count, groups, PANEL]}")
    if panels.kind in BITS:
        require(panels.bits == BITS[panels.kind], "bits", str(panels.bits), str(BITS[panels.kind]))
    _check_blocks(panels, shapes[0])
    require(takes_group(panels.group, k), "group", str(panels.group), "16, 32, 64 or 128 times n")
    if panels.zeros is not None:
        require_matrix("zeros", panels.zeros, shapes[0], torch.int8, scales.device)
    if panels.columns is not None:
        require_matrix("columns", panels.columns, (k,), torch.int32, scales.device)
    for name in ("codes", "columns", *NUMBERS):
        require_whole(name, getattr(panels, name))


def _check_own(panels: Panels, dtype: torch.dtype) -> None:
    own, n = panels.own, panels.shape[0]
    if own is None:
        return
    require(dtype == torch.bfloat16, "columns of their own", "given", "None but for rows in bf16")
    count, device = len(own.columns), panels.codes.device
    require_matrix("own.columns", own.columns, (count,), torch.int32, device)
    require_matrix("own.numbers", own.numbers, (n, count), torch.bfloat16, device)
    for part in (own.columns, own.numbers):
        require_whole("own columns", part)


def _check_blocks(panels: Panels, shape: tuple[int, ...]) -> None:
    """What llama.cpp's blocks have beside scales. shape: of numbers of groups."""
    minima, each = panels.minima, panels.each
    if panels.kind in ("uint", "iq4"):
        plain = panels.plain == torch.float32 and panels.zeros is None
        require(plain, "codes", panels.kind, "int where there are zeros, or plain is not fp32")
    require(minima is None or panels.kind == "uint", "codes", panels.kind, "uint with minima")
    if minima is not None and (minima.shape != shape or minima.dtype not in MINIMA):
        raise wrong("minima", minima, f"fp16 or int8 {list(shape)}")
    outer = (shape[0], shape[1] // each, PANEL)
    right = each & (each - 1) == 0 and shape[1] % each == 0
    for name in ("outer_scales", "outer_minima"):
        numbers = getattr(panels, name)
        if numbers is None:
            continue
        if not right or numbers.shape != outer or numbers.dtype != torch.float16:
            raise wrong(name, numbers, f"fp16 [{outer[0]}, {shape[1]} / 1, 2, 4, ..., {PANEL}]")
