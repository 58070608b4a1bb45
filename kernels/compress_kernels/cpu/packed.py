"""Multiplies rows by codes in panels, with packed_dots.cpp, float_dots.cpp and packed_rows.cpp of
csrc/products."""

import ctypes

import torch
from torch import Tensor

from compress_kernels.cpu.library import FLOAT_KINDS, STATE_KINDS, address, native
from compress_kernels.cpu.pairs import PairStruct
from compress_kernels.panels import Panels, panel_bytes
from compress_kernels.rounding import FloatRounding, RowRounding

PLANES = {"exact": 0, "int8": 1, "int16": 2}
# As in csrc/products/panels.h.
CODES = {"int": 0, "e2m1": 1, "e4m3": 2, "uint": 3, "iq4": 4}
ROUNDING = {"token": 1, "fixed": 2, "absmax": 3, "outliers": 4}
FLOATS, FIXED_FLOATS = 5, 6
PACKED_KINDS = {**STATE_KINDS, torch.float8_e4m3fn: 4}
BY_MATH = RowRounding("token", 0.0)  # in place of a scheme's; its numbers are not read
E4M3_MAX = 448.0

Rounding = RowRounding | FloatRounding


class PackedStruct(ctypes.Structure):
    """Mirrors `Packed` in csrc/products/panels.h. stride, out_stride: numbers from row to row of x
    and of out."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scales", "zeros", "columns")),
        *((name, ctypes.c_void_p) for name in ("minima", "outer_scales", "outer_minima")),
        *((name, ctypes.c_void_p) for name in ("bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "stride", "out_stride")),
        *((name, ctypes.c_int64) for name in ("panel_bytes", "group", "groups")),
        ("input_group", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("bits", "codes_are", "scale_kind", "shared")),
        *((name, ctypes.c_int32) for name in ("plain_kind", "planes", "rounding", "threads")),
        *((name, ctypes.c_int32) for name in ("minimum_kind", "outer_shift")),
        *((name, ctypes.c_float) for name in ("divisor", "factor")),
        *((name, ctypes.c_float) for name in ("largest", "fixed", "threshold")),
    ]


class PackedPairsStruct(ctypes.Structure):
    """Mirrors `PackedPairs` in csrc/products/packed_pairs.cpp."""

    _fields_ = [
        *(("rows", PairStruct), ("codes", PackedStruct)),
        *(("own_columns", ctypes.c_void_p), ("own_numbers", ctypes.c_void_p)),
        ("own", ctypes.c_int64),
    ]


def packed_linear(
    x: Tensor, panels: Panels, bias: Tensor | None, math: str, rounding: Rounding | None = None
) -> Tensor:
    """x [M, K], bias [N] or None -> [M, N], all fp32, or bf16 under exact.

    `ops.packed.packed_linear` calls it and has checked the arguments.
    """
    library = native().library
    assert library is not None, "ops.packed falls back to torch where nothing was compiled"
    x = x if x.stride(1) == 1 else x.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = x.new_empty(len(x), panels.shape[0])
    if x.dtype == torch.bfloat16:
        library.packed_pairs(ctypes.byref(packed_pairs_struct(x, panels, bias, out)))
        return out
    run = getattr(library, function_of(math, rounding))
    run(ctypes.byref(packed_struct(x, panels, bias, out, math, rounding)))
    return out


def packed_pairs_struct(
    x: Tensor, panels: Panels, bias: Tensor | None, out: Tensor
) -> PackedPairsStruct:
    """What the C function is given: addresses of tensors that must outlive it, x, bias and out in
    bf16. Numbers of a row lie side by side, rows of x and of out apart."""
    n, k = panels.shape
    rows = PairStruct(
        x.data_ptr(), None, address(bias), out.data_ptr(),
        len(x), k, n, x.stride(0), out.stride(0), 0, torch.get_num_threads(),
    )  # fmt: skip
    own, codes = panels.own, packed_struct(x, panels, None, out, "exact")
    if own is None:
        return PackedPairsStruct(rows, codes, None, None, 0)
    columns, numbers = own.columns.data_ptr(), own.numbers.data_ptr()
    return PackedPairsStruct(rows, codes, columns, numbers, len(own.columns))


def function_of(math: str, rounding: Rounding | None = None) -> str:
    """Of csrc, by name."""
    if isinstance(rounding, FloatRounding):
        return "float_dots"
    return "packed_rows" if math == "exact" else "packed_dots"


def packed_struct(
    x: Tensor,
    panels: Panels,
    bias: Tensor | None,
    out: Tensor,
    math: str,
    rounding: Rounding | None = None,
) -> PackedStruct:
    """What the C function is given: addresses of tensors that must outlive it. Numbers of a row lie
    side by side, rows of x and of out apart."""
    n, k = panels.shape
    scales, minima, how, kind, input_group = panels.scales, panels.minima, BY_MATH, 0, k
    planes = PLANES[math] if rounding is None else 1
    if isinstance(rounding, RowRounding):
        how, kind = rounding, ROUNDING[rounding.kind]
    elif rounding is not None:
        how = RowRounding("fixed", E4M3_MAX, 1.0 if rounding.scale is None else rounding.scale)
        kind = FLOATS if rounding.scale is None else FIXED_FLOATS
        input_group = rounding.group or k
    # E2M1 codes count twice in sums of whole numbers.
    factor = panels.factor / (2 if panels.kind == "e2m1" and planes else 1)
    return PackedStruct(
        x.data_ptr(), panels.codes.data_ptr(), scales.data_ptr(), address(panels.zeros),
        address(panels.columns), address(panels.minima), address(panels.outer_scales),
        address(panels.outer_minima), address(bias), out.data_ptr(),
        len(x), k, n, x.stride(0), out.stride(0),
        panel_bytes(k, panels.bits, panels.layout), panels.group, scales.shape[1], input_group,
        panels.bits, CODES[panels.kind], PACKED_KINDS[scales.dtype], int(scales.shape[2] == 1),
        FLOAT_KINDS[panels.plain], planes, kind, torch.get_num_threads(),
        0 if minima is None else PACKED_KINDS[minima.dtype], panels.each.bit_length() - 1,
        panels.divisor, factor, how.largest, how.scale, how.threshold,
    )  # fmt: skip
