"""Rows in bf16 times a weight in bf16 that lies in panels."""

import torch
from torch import Tensor

from compress_kernels.cpu import pairs as cpu_pairs
from compress_kernels.cpu.levels import X86, levels
from compress_kernels.cpu.library import native
from compress_kernels.ops.checks import require_whole, wrong
from compress_kernels.pairs import PANEL, PairPanels
from compress_kernels.reference import pairs as reference

# Others have instructions for bf16, too, which torch's products use.
_X86 = levels() is X86


def compiled_pairs(device: torch.device) -> bool:
    """Whether compiled code multiplies in bf16 there, panels or not."""
    return _X86 and device.type == "cpu" and native().library is not None


def pair_linear(x: Tensor, weight: PairPanels, bias: Tensor | None = None) -> Tensor:
    """x bf16 [rows, K], bias bf16 [N] or None -> bf16 [rows, N], on the CPU.

    Compiled, a number is summed in fp32 along the columns, of each two neighbours the second's
    product before the first's, the bias added and all rounded to bf16 once: a row's bits depend on
    nothing else and are those of linear.linear with the weight as rows. They are the same on every
    instruction set that has a fused multiply-add; numbers below 2^-126 count as 0 on the way.
    Raises ValueError on a wrong shape or dtype.
    """
    n, k = weight.shape
    if x.dim() != 2 or x.shape[1] != k or x.dtype != torch.bfloat16:
        raise wrong("x", x, f"torch.bfloat16 [rows, {k}]")
    if bias is not None and (bias.shape != (n,) or bias.dtype != torch.bfloat16):
        raise wrong("bias", bias, f"torch.bfloat16 [{n}]")
    values, laid = weight.values, (-(-n // PANEL), (k + 1) // 2, PANEL, 2)
    if values.shape != laid or values.dtype != torch.bfloat16:
        raise wrong("values", values, f"torch.bfloat16 {list(laid)}")
    require_whole("values", values)
    if native().library is None or k == 0:
        return reference.pair_linear(x, weight, bias)
    out = x.new_empty(x.shape[0], n)
    cpu_pairs.pair_linear(x, weight, bias, out)
    return out
