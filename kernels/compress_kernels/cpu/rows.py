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
        *((name, ctypes.c_int64) for name in ("rows", "width", "stride", "heads")),
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


class Spread(ctypes.Structure):
    """Mirrors `Spread` in csrc/rows.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "stride", "heads", "dim", "size")),
        ("kind", ctypes.c_int32),
    ]


class Gather(ctypes.Structure):
    """Mirrors `Gather` in csrc/rows.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("from", "index", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        ("factor", ctypes.c_float),
        ("kind", ctypes.c_int32),
    ]


class Add(ctypes.Structure):
    """Mirrors `Add` in csrc/rows.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "other", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
    ]


def rms_norm(x: Tensor, weight: Tensor, eps: float, late: bool) -> Tensor:
    """As rows.rms_norm."""
    flat = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
    out, weight = x.new_empty(x.shape), weight.contiguous()
    _library().rms_norm(ctypes.byref(norm_struct(flat[:, None], weight, out, eps, late)))
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As rows.rotate."""
    x = x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
    late = cos.dtype == torch.float32 != x.dtype
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    out = x.new_empty(x.shape)
    _library().rotate_heads(ctypes.byref(rotate_struct(x, cos, sin, out, late)))
    return out


def gate(gate: Tensor, up: Tensor, function: str) -> Tensor:
    """As rows.gate."""
    if gate.stride() != up.stride() or gate.stride(1) != 1:
        gate, up = gate.contiguous(), up.contiguous()
    out = gate.new_empty(gate.shape)
    _library().gate_rows(ctypes.byref(gate_struct(gate, up, out, function)))
    return out


def spread(x: Tensor) -> Tensor:
    """As rows.spread."""
    heads = x.reshape(-1, 1, x.shape[-1]) if x.dim() != 3 else x
    heads = heads if heads.stride()[1:] == (x.shape[-1], 1) else heads.contiguous()
    out = x.new_empty(x.shape)
    _library().spread_heads(ctypes.byref(spread_struct(heads, out)))
    return out


# What the C functions are given: addresses of tensors that must outlive it.


def norm_struct(x: Tensor, weight: Tensor, out: Tensor, eps: float, late: bool) -> RmsNorm:
    """x: [rows, heads, n], rows apart; weight and out without gaps."""
    rows, heads, width = x.shape
    return RmsNorm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(),
        rows, width, x.stride(0), heads, eps, late, FLOAT_KINDS[x.dtype],
    )  # fmt: skip


def rotate_struct(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, late: bool) -> Rotate:
    """x: [rows, heads, dim], rows apart; cos, sin: fp32, they and out without gaps."""
    rows, heads, dim = x.shape
    return Rotate(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
        rows, x.stride(0), heads, dim, cos.shape[1], late, FLOAT_KINDS[x.dtype],
    )  # fmt: skip


def gate_struct(gate: Tensor, up: Tensor, out: Tensor, function: str) -> Gate:
    """gate, up: [rows, n], rows as far apart; out without gaps."""
    return Gate(
        gate.data_ptr(), up.data_ptr(), out.data_ptr(),
        *gate.shape, gate.stride(0), FUNCTIONS[function], FLOAT_KINDS[gate.dtype],
    )  # fmt: skip


def spread_struct(x: Tensor, out: Tensor) -> Spread:
    """x: [rows, heads, dim], rows apart; out without gaps."""
    rows, heads, dim = x.shape
    return Spread(
        x.data_ptr(), out.data_ptr(), rows, x.stride(0), heads, dim, dim & -dim,
        FLOAT_KINDS[x.dtype],
    )  # fmt: skip


def gather_struct(of: Tensor, index: Tensor, out: Tensor, factor: float) -> Gather:
    """of: [any, n]; index: int64 [rows]; out: fp32 [rows, n]; all without gaps. Rows of `of`, times
    the factor."""
    return Gather(
        of.data_ptr(), index.data_ptr(), out.data_ptr(), *out.shape, factor, FLOAT_KINDS[of.dtype]
    )


def add_struct(x: Tensor, other: Tensor, out: Tensor) -> Add:
    """All fp32 [rows, n] without gaps; out may be x."""
    return Add(x.data_ptr(), other.data_ptr(), out.data_ptr(), *x.shape)


def _library() -> ctypes.CDLL:
    library = native().library
    assert library is not None, "the op falls back to the reference"
    return library
