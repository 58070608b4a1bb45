"""Multiplies rows in bf16 by a weight in bf16, with csrc/products/pair_rows.cpp."""

import ctypes

import torch
from torch import Tensor

from compress_kernels.cpu.library import address, native
from compress_kernels.pairs import PairPanels


class PairStruct(ctypes.Structure):
    """Mirrors `PairRows` in csrc/products/pair_rows.h. stride, out_stride: numbers from row to
    row."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "outputs")),
        *((name, ctypes.c_int64) for name in ("stride", "out_stride")),
        *((name, ctypes.c_int32) for name in ("panels", "threads")),
    ]


def pair_linear(x: Tensor, weight: PairPanels | Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x [rows, K], weight [N, K] in panels or by rows, bias [N] or None -> out [rows, N], all bf16.

    `ops.pairs.pair_linear` and `ops.linear.linear` call it and have checked the arguments. Rows of
    x and of out may lie apart in memory.
    """
    library = native().library
    assert library is not None, "the ops fall back to torch where nothing was compiled"
    x = x if x.stride(1) == 1 else x.contiguous()
    bias = None if bias is None else bias.contiguous()
    weight = weight if isinstance(weight, PairPanels) else weight.contiguous()
    library.pair_rows(ctypes.byref(pair_struct(x, weight, bias, out)))


def pair_struct(
    x: Tensor, weight: PairPanels | Tensor, bias: Tensor | None, out: Tensor
) -> PairStruct:
    """What the C function is given: addresses of tensors that must outlive it. Numbers of a row lie
    side by side, weight and bias without gaps."""
    values = weight.values if isinstance(weight, PairPanels) else weight
    outputs, columns = weight.shape
    return PairStruct(
        x.data_ptr(), values.data_ptr(), address(bias), out.data_ptr(),
        x.shape[0], columns, outputs, x.stride(0), out.stride(0),
        int(isinstance(weight, PairPanels)), torch.get_num_threads(),
    )  # fmt: skip
