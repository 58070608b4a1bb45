"""Group scales: arguments checked, then one implementation by device."""

import torch
from torch import Tensor

from compress_kernels.cpu import scale as cpu_scale
from compress_kernels.cpu.library import native
from compress_kernels.gptq.problem import Grid
from compress_kernels.ops.checks import has_triton, ratios_of, require, require_grid, require_matrix
from compress_kernels.reference import scale as reference_scale


def group_scale(
    w: Tensor,
    ratios: Tensor,
    importance: Tensor | None,
    bits: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Scale, and zero when asymmetric, of each row of w with the least weighted squared error.

    w: fp32 [N, g]. ratios: fp32 [R], shrinks of the min-max range to try, first wins ties; [1.0]
    is plain min-max, negative ones (symmetric only) give negative scales. importance: fp32 [g],
    weight of each column's squared error, or None.
    Returns fp32 [N], exact in scale_dtype (fp32, bf16, fp16), and int8 [N] or None. A row of
    zeros gets scale 1. Raises ValueError on a wrong shape, dtype or range.
    """
    grid = Grid(bits, symmetric, scale_dtype)
    require_grid(grid)
    require(w.dim() == 2 and w.numel() > 0, "w", f"shape {list(w.shape)}", "[N, g], not empty")
    require_matrix("w", w, (w.shape[0], w.shape[1]), torch.float32, w.device)
    ratios = ratios_of(ratios, symmetric, w.device)
    if importance is not None:
        require_matrix("importance", importance, (w.shape[1],), torch.float32, w.device)
    # The Triton kernel walks through a row alone: one row over all columns goes to torch.
    if w.is_cuda and has_triton() and w.shape[0] > 1:
        from compress_kernels.triton import scale as triton_scale

        with torch.cuda.device(w.device):
            return triton_scale.group_scale(w, ratios, importance, grid)
    if w.device.type == "cpu" and native().library is not None:
        return cpu_scale.group_scale(w, ratios, importance, grid)
    return reference_scale.group_scale(w, ratios, importance, grid)
