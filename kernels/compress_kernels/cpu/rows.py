"""Rows between matrix products by csrc/rows.cpp; the specification is reference.rows."""

import ctypes

import torch
from torch import Tensor

from compress_kernels.cpu.library import FLOAT_KINDS, native

FUNCTIONS = {"silu": 0, "gelu_tanh": 1}


class RmsNorm(ctypes.Structure):
    """Mirrors `RmsNorm` in csrc/rows.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "stride")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("late", "kind")),
    ]


class Rotate(ctypes.Structure):
    """Mirrors `Rotate` in csrc/rows.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "stride", "heads", "dim", "pairs")),
        *((name, ctypes.c_int32) for name in ("late", "kind")),
    ]


class Gate(ctypes.Structure):
    """Mirrors `Gate` in csrc/rows.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gate", "up", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "stride")),
        *((name, ctypes.c_int32) for name in ("function", "kind")),
    ]


def rms_norm(x: Tensor, weight: Tensor, eps: float, late: bool) -> Tensor:
    """As rows.rms_norm."""
    width, kind = x.shape[-1], FLOAT_KINDS[x.dtype]
    flat = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, width).contiguous()
    out, weight = x.new_empty(x.shape), weight.contiguous()
    task = RmsNorm(
        flat.data_ptr(), weight.data_ptr(), out.data_ptr(),
        flat.shape[0], width, flat.stride(0), eps, late, kind,
    )  # fmt: skip
    _library().rms_norm(ctypes.byref(task))
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As rows.rotate."""
    rows, heads, dim = x.shape
    x = x if x.stride()[1:] == (dim, 1) else x.contiguous()
    late = cos.dtype == torch.float32 != x.dtype
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    out = x.new_empty(x.shape)
    task = Rotate(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
        rows, x.stride(0), heads, dim, cos.shape[1], late, FLOAT_KINDS[x.dtype],
    )  # fmt: skip
    _library().rotate_heads(ctypes.byref(task))
    return out


def gate(gate: Tensor, up: Tensor, function: str) -> Tensor:
    """As rows.gate."""
    if gate.stride() != up.stride() or gate.stride(1) != 1:
        gate, up = gate.contiguous(), up.contiguous()
    out = gate.new_empty(gate.shape)
    task = Gate(
        gate.data_ptr(), up.data_ptr(), out.data_ptr(),
        *gate.shape, gate.stride(0), FUNCTIONS[function], FLOAT_KINDS[gate.dtype],
    )  # fmt: skip
    _library().gate_rows(ctypes.byref(task))
    return out


def _library() -> ctypes.CDLL:
    library = native().library
    assert library is not None, "the op falls back to the reference"
    return library
