"""Rows times a weight by csrc/linear.cpp, fp32."""

import ctypes

import torch
from torch import Tensor

from compress_kernels.cpu.library import address, native


class LinearStruct(ctypes.Structure):
    """Mirrors `Linear` in csrc/linear.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "outputs")),
        *((name, ctypes.c_int64) for name in ("stride", "out_stride")),
        ("threads", ctypes.c_int32),
    ]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """As linear.linear, arguments checked; the result goes to `out`, whose rows may lie apart."""
    library = native().library
    assert library is not None, "the op falls back to torch"
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    task = LinearStruct(
        x.data_ptr(), weight.data_ptr(), address(bias), out.data_ptr(),
        x.shape[0], weight.shape[1], weight.shape[0], x.stride(0), out.stride(0),
        torch.get_num_threads(),
    )  # fmt: skip
    library.linear_rows(ctypes.byref(task))
