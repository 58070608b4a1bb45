"""Rows between matrix products by csrc/rows/rows.cpp, norms.cpp and gates.cpp.

The specification is reference.rows.
"""

import ctypes

import torch
from torch import Tensor

from compress_kernels.cpu.library import FLOAT_KINDS, address, native
from compress_kernels.pairs import PairPanels

# As `kFunctions` in csrc/rows/gates.cpp.
FUNCTIONS = (
    "silu", "gelu_tanh", "gelu", "quick_gelu", "relu", "relu2", "sigmoid", "tanh", "linear",
)  # fmt: skip


class Heads(ctypes.Structure):
    """Mirrors `Heads` in csrc/rows/rows.h."""

    _fields_ = [("data", ctypes.c_void_p), ("row", ctypes.c_int64), ("head", ctypes.c_int64)]


class RmsNorm(ctypes.Structure):
    """Mirrors `RmsNorm` in csrc/rows/norms.cpp."""

    _fields_ = [
        *((name, Heads) for name in ("x", "out")),
        ("weight", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "width")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("late", "kind", "threads")),
    ]


class LayerNorm(ctypes.Structure):
    """Mirrors `LayerNorm` in csrc/rows/norms.cpp."""

    _fields_ = [
        *((name, Heads) for name in ("x", "out")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "width")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("kind", "threads")),
    ]


class Rotate(ctypes.Structure):
    """Mirrors `Rotate` in csrc/rows/rows.cpp."""

    _fields_ = [
        *((name, Heads) for name in ("x", "out")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "dim", "pairs")),
        *((name, ctypes.c_int32) for name in ("late", "kind", "interleaved", "threads")),
    ]


class Gate(ctypes.Structure):
    """Mirrors `Gate` in csrc/rows/gates.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gate", "up", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "stride")),
        *((name, ctypes.c_int32) for name in ("function", "kind", "threads")),
    ]


class Spread(ctypes.Structure):
    """Mirrors `Spread` in csrc/rows/rows.cpp."""

    _fields_ = [
        *((name, Heads) for name in ("x", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "dim", "size")),
        ("kind", ctypes.c_int32),
    ]


class Gather(ctypes.Structure):
    """Mirrors `Gather` in csrc/rows/rows.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("from", "index", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        ("factor", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("kind", "out_kind", "panels")),
    ]


class Add(ctypes.Structure):
    """Mirrors `Add` in csrc/rows/rows.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "other", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        *((name, ctypes.c_int32) for name in ("kind", "threads")),
    ]


class Highest(ctypes.Structure):
    """Mirrors `Highest` in csrc/rows/rows.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "index", "highest")),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        *((name, ctypes.c_int32) for name in ("kind", "threads")),
    ]


def rms_norm(x: Tensor, weight: Tensor, eps: float, late: bool) -> Tensor:
    """As rows.rms_norm."""
    out, weight = x.new_empty(x.shape), weight.contiguous()
    _library().rms_norm(ctypes.byref(norm_struct(_heads(x), weight, _heads(out), eps, late)))
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """As rows.layer_norm."""
    out, weight = x.new_empty(x.shape), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    struct = centred_struct(_heads(x), (weight, bias), _heads(out), eps)
    _library().layer_norm(ctypes.byref(struct))
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """As rows.rotate."""
    x = x if x.stride(2) == 1 else x.contiguous()
    late = cos.dtype == torch.float32 != x.dtype
    angles = cos.float().contiguous(), sin.float().contiguous()
    out = x.new_empty(x.shape)
    struct = rotate_struct(x, angles, out, late=late, interleaved=interleaved)
    _library().rotate_heads(ctypes.byref(struct))
    return out


def activate(x: Tensor, function: str) -> Tensor:
    """As rows.activate."""
    x = x.contiguous()
    out = x.new_empty(x.shape)
    rows = x.view(-1, x.shape[-1])
    _library().gate_rows(ctypes.byref(gate_struct(rows, None, out, function)))
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
    out = x.new_empty(x.shape)
    _library().spread_heads(ctypes.byref(spread_struct(_heads(x), _heads(out))))
    return out


def highest(x: Tensor) -> tuple[Tensor, Tensor]:
    """As rows.highest."""
    x, values = x.contiguous(), x.new_empty(len(x), dtype=torch.float32)
    index = values.new_empty(len(x), dtype=torch.int64)
    _library().highest_of_rows(ctypes.byref(highest_struct(x, index, values)))
    return index, values


def _heads(x: Tensor) -> Tensor:
    """[..., n] as [rows, heads, n], whose numbers lie side by side."""
    x = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    return x if x.stride(2) == 1 else x.contiguous()


# What the C functions are given: addresses of tensors that must outlive it.


def norm_struct(x: Tensor, weight: Tensor, out: Tensor, eps: float, late: bool) -> RmsNorm:
    """x, out: [rows, heads, n], rows and heads anywhere; weight without gaps."""
    heads = _where(x), _where(out)
    return RmsNorm(
        *heads, weight.data_ptr(), *x.shape, eps, late, FLOAT_KINDS[x.dtype],
        torch.get_num_threads(),
    )  # fmt: skip


def centred_struct(
    x: Tensor, linear: tuple[Tensor, Tensor | None], out: Tensor, eps: float
) -> LayerNorm:
    """As norm_struct; linear: weight and bias, without gaps."""
    weight, bias = linear
    return LayerNorm(
        _where(x), _where(out), weight.data_ptr(), address(bias),
        *x.shape, eps, FLOAT_KINDS[x.dtype], torch.get_num_threads(),
    )  # fmt: skip


def rotate_struct(
    x: Tensor, angles: tuple[Tensor, Tensor], out: Tensor, *, late: bool, interleaved: bool
) -> Rotate:
    """x, out: [rows, heads, dim], rows and heads anywhere; angles: fp32, without gaps."""
    cos, sin = angles
    return Rotate(
        _where(x), _where(out), cos.data_ptr(), sin.data_ptr(),
        *x.shape, cos.shape[1], late, FLOAT_KINDS[x.dtype], interleaved,
        torch.get_num_threads(),
    )  # fmt: skip


def _where(x: Tensor) -> Heads:
    return Heads(x.data_ptr(), x.stride(0), x.stride(1))


def gate_struct(gate: Tensor, up: Tensor | None, out: Tensor, function: str) -> Gate:
    """gate, up: [rows, n], rows as far apart; out without gaps. Without `up` nothing is gated."""
    return Gate(
        gate.data_ptr(), address(up), out.data_ptr(),
        *gate.shape, gate.stride(0), FUNCTIONS.index(function), FLOAT_KINDS[gate.dtype],
        torch.get_num_threads(),
    )  # fmt: skip


def spread_struct(x: Tensor, out: Tensor) -> Spread:
    """x, out: [rows, heads, dim], rows and heads anywhere."""
    dim = x.shape[2]
    return Spread(_where(x), _where(out), *x.shape, dim & -dim, FLOAT_KINDS[x.dtype])


def gather_struct(of: Tensor | PairPanels, index: Tensor, out: Tensor, factor: float) -> Gather:
    """of: [any, n]; index: int64 [rows]; out: [rows, n], fp32 or of the dtype of `of`, which it is
    where that lies in panels; all without gaps. Rows of `of`, times the factor."""
    paired = isinstance(of, PairPanels)
    values = of.values if isinstance(of, PairPanels) else of
    return Gather(
        values.data_ptr(), index.data_ptr(), out.data_ptr(), *out.shape, factor,
        FLOAT_KINDS[values.dtype], FLOAT_KINDS[out.dtype], paired,
    )  # fmt: skip


def add_struct(x: Tensor, other: Tensor, out: Tensor) -> Add:
    """All floats [rows, n] of one dtype without gaps; out may be x."""
    return Add(
        x.data_ptr(), other.data_ptr(), out.data_ptr(), *x.shape, FLOAT_KINDS[x.dtype],
        torch.get_num_threads(),
    )  # fmt: skip


def highest_struct(x: Tensor, index: Tensor, values: Tensor) -> Highest:
    """x: floats [rows, n]; index: int64 [rows]; values: fp32 [rows]; all without gaps."""
    return Highest(
        x.data_ptr(), index.data_ptr(), values.data_ptr(), *x.shape, FLOAT_KINDS[x.dtype],
        torch.get_num_threads(),
    )  # fmt: skip


def _library() -> ctypes.CDLL:
    library = native().library
    assert library is not None, "the op falls back to the reference"
    return library
