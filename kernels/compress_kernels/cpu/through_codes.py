"""Rows as codes give them back by csrc/rows/through_codes.cpp; the specification is
reference.through_codes."""

import ctypes

import torch
from torch import Tensor

from compress_kernels.cpu.library import FLOAT_KINDS, native
from compress_kernels.rounding import CodeRounding

# As in csrc/rows/through_codes.cpp.
CODES = {"int": 0, "e4m3": 1, "llm.int8": 2}


class ThroughCodes(ctypes.Structure):
    """Mirrors `ThroughCodes` in csrc/rows/through_codes.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "stride", "out_stride", "group")),
        *((name, ctypes.c_float) for name in ("largest", "scale", "threshold")),
        *((name, ctypes.c_int32) for name in ("codes", "fixed", "threads", "kind")),
    ]


def through_codes(x: Tensor, rounding: CodeRounding) -> Tensor:
    """As through_codes.through_codes, arguments checked."""
    library = native().library
    assert library is not None, "the op falls back to the reference"
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(x.shape)
    library.through_codes(ctypes.byref(through_struct(x, out, rounding)))
    return out


def through_struct(x: Tensor, out: Tensor, rounding: CodeRounding) -> ThroughCodes:
    """What the C function is given: addresses of tensors that must outlive it. x, out: fp32 or bf16
    [rows, n], rows apart; out may be x."""
    fixed = rounding.scale is not None
    scale = float(torch.tensor(rounding.scale if fixed else 1.0).to(x.dtype))
    return ThroughCodes(
        x.data_ptr(), out.data_ptr(),
        *x.shape, x.stride(0), out.stride(0), rounding.group or max(1, x.shape[1]),
        rounding.largest, scale, rounding.threshold,
        CODES[rounding.codes], fixed, torch.get_num_threads(), FLOAT_KINDS[x.dtype],
    )  # fmt: skip
