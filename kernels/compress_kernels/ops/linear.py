"""Rows times a weight, or of heads times one of each: each row's sums are its own."""

import torch
from torch import Tensor

from compress_kernels.cpu import linear as cpu_linear
from compress_kernels.cpu import pairs as cpu_pairs
from compress_kernels.cpu.library import native
from compress_kernels.heads import PANEL, HeadPanels
from compress_kernels.ops.checks import require_whole, wrong
from compress_kernels.ops.pairs import compiled_pairs
from compress_kernels.reference import linear as reference

# In multiples of so many rows torch's products give each the same bits, if at all.
ROWS = 16
# Of weights that become fp32 number by number in a product.
WIDENED = (torch.bfloat16, torch.float16)


def row_multiple(dtype: torch.dtype, device: torch.device) -> int:
    """In multiples of so many rows `linear` is to be called for the bits of each to be its own."""
    return 1 if _compiled(dtype, device) else ROWS


def reads(stored: torch.dtype, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `linear` reads a weight of dtype `stored` as it lies for products in `dtype`; else it
    is better converted once."""
    widened = stored in WIDENED and dtype == torch.float32
    return stored == dtype or (widened and _compiled(dtype, device))


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x [rows, K], weight [N, K], bias [N] or None, of one float dtype -> [rows, N].

    The weight may be bf16 or fp16 where x is fp32: the result is that of its fp32 copy, to the bit.
    out: where the result goes, a view of columns too. On a CPU in fp32, in fp16 (fp32's sums,
    rounded once) and on x86 in bf16 (as pairs.pair_linear has it), compiled code runs, where a
    row's bits depend on nothing else; torch's products give that on multiples of 16 rows at best.
    Raises ValueError on a wrong shape or dtype.
    """
    outputs, columns = weight.shape
    if x.dim() != 2 or x.shape[1] != columns:
        raise wrong("x", x, f"[rows, {columns}]")
    if x.dtype != weight.dtype and (x.dtype != torch.float32 or weight.dtype not in WIDENED):
        raise wrong("x", x, f"{weight.dtype}")
    if bias is not None and (bias.shape != (outputs,) or bias.dtype != x.dtype):
        raise wrong("bias", bias, f"{x.dtype} [{outputs}]")
    # Compiled code divides by the number of columns.
    compiled = columns > 0 and _compiled(x.dtype, x.device)
    if out is None and not compiled:
        return reference.linear(x, weight, bias)
    shape = (x.shape[0], outputs)
    if out is None:
        out = x.new_empty(shape)
    elif out.shape != shape or out.dtype != x.dtype or out.stride(1) != 1:
        raise wrong("out", out, f"{x.dtype} {list(shape)}, its columns side by side")
    if compiled and x.dtype == torch.bfloat16:
        cpu_pairs.pair_linear(x, weight, bias, out)
    elif compiled and x.dtype == torch.float16:
        out.copy_(linear(x.float(), weight, widened(bias)))
    elif compiled:
        cpu_linear.linear(x, weight, bias, out)
    else:
        out.copy_(reference.linear(x, weight, bias))
    return out


def head_linear(x: Tensor, weight: HeadPanels) -> Tensor:
    """x [rows, heads, K] -> [rows, heads, N] in its dtype.

    The weight is of x's dtype, or bf16 or fp16 where x is fp32: the result is that of its fp32
    copy, to the bit. In fp32 and fp16 on a CPU compiled code runs as in `linear`. Raises ValueError
    on a wrong shape or dtype.
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
    if x.dtype == torch.bfloat16 or not _compiled(x.dtype, x.device):
        return reference.head_linear(x, weight)
    if x.dtype == torch.float16:
        return head_linear(x.float(), weight).to(x.dtype)
    out = x.new_empty(x.shape[0], heads, outputs)
    cpu_linear.head_linear(x, weight, out)
    return out


def widened(bias: Tensor | None) -> Tensor | None:
    """In fp32."""
    return None if bias is None else bias.float()


def _compiled(dtype: torch.dtype, device: torch.device) -> bool:
    if dtype == torch.bfloat16:
        return compiled_pairs(device)
    wide = dtype in (torch.float32, torch.float16)
    return wide and device.type == "cpu" and native().library is not None
