"""Sum of xᵀx: arguments checked, then one implementation by device."""

import torch
from torch import Tensor

from compress_kernels.cpu import gram as cpu_gram
from compress_kernels.ops.checks import has_triton, require, require_matrix
from compress_kernels.reference import gram as reference_gram

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def gram_(x: Tensor, out: Tensor) -> None:
    """Add xᵀx to `out` in place, every product exact and every sum in fp32.

    x: [tokens, K] bf16, fp16 or fp32. out: fp32 [K, K], contiguous and symmetric (start from
    zeros: the lower triangle is copied from the upper one). Raises ValueError on anything else.
    """
    require(x.dim() == 2, "x", f"shape {list(x.shape)}", "[tokens, K]")
    require(x.dtype in FLOATS, "x", f"{x.dtype}", "bf16, fp16 or fp32")
    require_matrix("out", out, (x.shape[1], x.shape[1]), torch.float32, x.device)
    require(out.is_contiguous(), "out", "not contiguous", "a contiguous tensor")
    if x.is_cuda and has_triton():
        from compress_kernels.triton import gram as triton_gram

        with torch.cuda.device(x.device):  # Triton launches on the current one
            triton_gram.gram_(x, out)
    elif x.device.type == "cpu":
        cpu_gram.gram_(x, out)
    else:
        reference_gram.gram_(x, out)
