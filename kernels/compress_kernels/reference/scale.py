"""Choice of one scale (and zero) for a group of weights.

A candidate is the plain min-max grid shrunk by a ratio: clipping the largest weights makes the
steps of all others finer. A negative ratio makes the scale negative, which turns the grid around:
a symmetric one has a code more below zero than above. The candidate with the least weighted squared
error wins.
"""

import torch
from torch import Tensor

from compress_kernels.gptq.problem import Grid


def group_scale(
    w: Tensor, ratios: Tensor, importance: Tensor | None, grid: Grid
) -> tuple[Tensor, Tensor | None]:
    """Scale fp32 [N] and zero int8 [N] (None when symmetric) for w [N, g]; first wins a tie."""
    best_scale, best_zero = _candidate(w, ratios[0], grid)
    best_loss = _loss(w, best_scale, best_zero, importance, grid)
    for ratio in ratios[1:]:
        scale, zero = _candidate(w, ratio, grid)
        loss = _loss(w, scale, zero, importance, grid)
        better = loss < best_loss
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
        best_loss = torch.where(better, loss, best_loss)
    return best_scale, None if grid.symmetric else best_zero.to(torch.int8)


def quantize_column(w: Tensor, scale: Tensor, zero: Tensor, grid: Grid) -> Tensor:
    """Codes, as fp32, of w with scale and zero of a shape that broadcasts to it."""
    return ((w / scale).round() + zero).clamp(grid.code_min, grid.code_max)


def _candidate(w: Tensor, ratio: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Scale and zero [N], both fp32, of the min-max grid shrunk by `ratio`."""
    steps = grid.code_max - grid.code_min
    if grid.symmetric:
        scale = _round_scale(w.abs().amax(1) / (steps / 2) * ratio, grid.scale_dtype)
        return scale, torch.zeros_like(scale)
    low = w.amin(1).clamp(max=0) * ratio
    high = w.amax(1).clamp(min=0) * ratio
    scale = _round_scale((high - low) / steps, grid.scale_dtype)
    zero = (grid.code_min - low / scale).round().clamp(grid.code_min, grid.code_max)
    return scale, zero


def _round_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest value that `dtype` holds, 1 in place of 0, as fp32."""
    largest = torch.finfo(dtype).max
    rounded = scale.clamp(-largest, largest).to(dtype).float()
    return torch.where(rounded == 0, 1.0, rounded)


def _loss(w: Tensor, scale: Tensor, zero: Tensor, importance: Tensor | None, grid: Grid) -> Tensor:
    """Weighted squared error [N] of w [N, g]."""
    s, z = scale[:, None], zero[:, None]
    squared = (w - (quantize_column(w, s, z, grid) - z) * s).square()
    return (squared if importance is None else squared * importance).sum(1)
