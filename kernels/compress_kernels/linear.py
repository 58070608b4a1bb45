"""Rows times a weight: each row's sums are its own."""

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from compress_kernels.checks import require
from compress_kernels.cpu import linear as cpu_linear
from compress_kernels.cpu.library import native


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x [rows, K], weight [N, K], bias [N] or None, of one float dtype -> [rows, N].

    out: where the result goes, a view of columns too. In fp32 on a CPU compiled code runs, where a
    row's bits depend on nothing else; torch's products give that on multiples of 16 rows at best.
    Raises ValueError on a wrong shape or dtype.
    """
    shape = (len(x), len(weight))
    require(x.dim() == 2 and x.shape[1] == weight.shape[1], "x", x, f"[rows, {weight.shape[1]}]")
    require(x.dtype == weight.dtype, "x", x, f"{weight.dtype}")
    if bias is not None:
        good = bias.shape == shape[1:] and bias.dtype == x.dtype
        require(good, "bias", bias, f"{x.dtype} [{shape[1]}]")
    compiled = x.device.type == "cpu" and x.dtype == torch.float32 and native().library is not None
    if out is None and not compiled:
        return torch_linear(x, weight, bias)
    out = x.new_empty(shape) if out is None else out
    good = out.shape == shape and out.dtype == x.dtype and out.stride(1) == 1
    require(good, "out", out, f"{x.dtype} {list(shape)}, its columns side by side")
    if compiled:
        cpu_linear.linear(x, weight, bias, out)
    else:
        out.copy_(torch_linear(x, weight, bias))
    return out
