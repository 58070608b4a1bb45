"""Multiplies fp32 rows by a weight of fp32, bf16 or fp16, with csrc/products/linear.cpp; those of
heads by one of each, with csrc/products/heads.cpp."""

import ctypes

import torch
from torch import Tensor

from compress_kernels.cpu.library import FLOAT_KINDS, address, native
from compress_kernels.heads import HeadPanels


class LinearStruct(ctypes.Structure):
    """Mirrors `Linear` in csrc/products/linear.h. stride, out_stride: numbers from row to row."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "outputs")),
        *((name, ctypes.c_int64) for name in ("stride", "out_stride")),
        *((name, ctypes.c_int32) for name in ("kind", "threads")),
    ]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x [rows, K], weight [N, K], bias [N] or None -> out [rows, N] on the CPU, all fp32 but the
    weight, which is of FLOAT_KINDS.

    `ops.linear.linear` calls it and has checked the arguments. Rows of x and of out may lie apart
    in memory.
    """
    library = native().library
    assert library is not None, "ops.linear falls back to torch where nothing was compiled"
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    library.linear_rows(ctypes.byref(linear_struct(x, weight, bias, out)))


def linear_struct(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> LinearStruct:
    """What the C function is given: addresses of tensors that must outlive it. Numbers of a row lie
    side by side, weight and bias without gaps."""
    return LinearStruct(
        x.data_ptr(), weight.data_ptr(), address(bias), out.data_ptr(),
        x.shape[0], weight.shape[1], weight.shape[0], x.stride(0), out.stride(0),
        FLOAT_KINDS[weight.dtype], torch.get_num_threads(),
    )  # fmt: skip


class HeadProductsStruct(ctypes.Structure):
    """Mirrors `HeadProducts` in csrc/products/heads.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "columns", "outputs", "wide")),
        *((name, ctypes.c_int64) for name in ("stride", "head_stride")),
        *((name, ctypes.c_int64) for name in ("out_stride", "out_head_stride")),
        *((name, ctypes.c_int32) for name in ("kind", "threads")),
    ]


def head_linear(x: Tensor, weight: HeadPanels, out: Tensor) -> None:
    """x [rows, heads, K] -> out [rows, heads, N] on the CPU, fp32; rows and heads may lie apart.

    `ops.linear.head_linear` calls it and has checked the arguments.
    """
    library = native().library
    assert library is not None, "ops.linear falls back to torch where nothing was compiled"
    x = x if x.stride(2) == 1 else x.contiguous()
    library.head_rows(ctypes.byref(heads_struct(x, weight, out)))


def heads_struct(x: Tensor, weight: HeadPanels, out: Tensor) -> HeadProductsStruct:
    """What the C function is given: addresses of tensors that must outlive it."""
    heads, columns, wide = weight.values.shape
    return HeadProductsStruct(
        x.data_ptr(), weight.values.data_ptr(), out.data_ptr(),
        x.shape[0], heads, columns, weight.outputs, wide,
        x.stride(0), x.stride(1), out.stride(0), out.stride(1),
        FLOAT_KINDS[weight.values.dtype], torch.get_num_threads(),
    )  # fmt: skip
