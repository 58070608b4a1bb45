"""Rows of heads, each times a weight of its own: a row's sums are its own."""

import torch
from torch import Tensor

from compress_kernels.cpu import linear as cpu
from compress_kernels.cpu.library import native
from compress_kernels.heads import PANEL, HeadPanels
from compress_kernels.ops.checks import require_whole, wrong
from compress_kernels.ops.linear import WIDENED
from compress_kernels.reference import heads as reference


def head_linear(x: Tensor, weight: HeadPanels) -> Tensor:
    """x [rows, heads, K] -> [rows, heads, N] in its dtype.

    The weight is of x's dtype, or bf16 or fp16 where x is fp32: the result is that of its fp32
    copy, to the bit. In fp32 on a CPU compiled code runs, where a row's bits depend on nothing
    else; of torch's products that is true of multiples of 16 rows at best. Raises ValueError on a
    wrong shape or dtype.
    """
    heads, outputs, columns = weight.shape
    values = weight.values
    if x.dim() != 3 or x.shape[1:] != (heads, columns):
        raise wrong("x", x, f"[rows, {heads}, {columns}]")
    if x.dtype != values.dtype and (x.dtype != torch.float32 or values.dtype not in WIDENED):
        raise wrong("x", x, f"{values.dtype}")
    if values.shape[2] % PANEL or not 0 <= values.shape[2] - outputs < PANEL:
        raise wrong("values", values, f"[{heads}, {columns}, {outputs} filled up to {PANEL}]")
    require_whole("values", values)
    if x.dtype != torch.float32 or x.device.type != "cpu" or native().library is None:
        return reference.head_linear(x, weight)
    out = x.new_empty(x.shape[0], heads, outputs)
    cpu.head_linear(x, weight, out)
    return out
