"""Rows times codes in panels, in plain torch: what each math computes, to the bit."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from compress_kernels.panels import RUN, Panels, by_output, codes_of, decoded

# What the largest number of a run is rounded to. In two planes of bytes, 256 * high + low.
LARGEST = {"int16": 32512.0, "int8": 127.0}
LEAST = 1e-30  # smaller numbers are 0


def packed_linear(x: Tensor, panels: Panels, bias: Tensor | None, math: str) -> Tensor:
    """As packed.packed_linear, arguments checked."""
    if math == "exact":
        return linear(x, decoded(panels), bias)
    n, k = panels.shape
    columns = torch.arange(k) if panels.columns is None else panels.columns.long()
    codes, x = codes_of(panels)[:, columns].long(), x[:, columns]
    scales = by_output(panels.scales, n).float()
    zeros = None if panels.zeros is None else by_output(panels.zeros, n).long()
    run, total = min(RUN, panels.group), x.new_zeros(len(x), n)
    for start in range(0, k, run):
        whole, scale = rounded_run(x[:, start : start + run], LARGEST[math])
        part, group = codes[:, start : start + run], start // panels.group
        if zeros is not None:
            part = part - zeros[:, group, None]
        total = _fma((whole @ part.T).float(), scale[:, None] * scales[:, group], total)
    return total if bias is None else total + bias


def rounded_run(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """x: fp32 [M, columns of a run] -> whole numbers int64 [M, columns], what each is worth [M].

    A run with NaN or infinity is worth NaN.
    """
    top = x.abs().amax(1)
    top = torch.where(top < LEAST, 0.0, torch.where(top < torch.inf, top, torch.nan))
    some, most = top > 0, torch.full_like(top, largest)  # a number would be times 1 / top
    inverse = torch.where(some, most / top, 0.0)
    whole = torch.where(some[:, None], (x * inverse[:, None]).round(), 0.0)
    return whole.long(), top / most


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of fp32, rounded once: the sum is rounded to odd in fp64 before."""
    product, more = a.double() * b.double(), c.double().expand(a.shape)
    total = product + more
    back = total - product
    lost = (product - (total - back)) + (more - back)
    bits = total.view(torch.int64)
    away = (lost != 0) & ((lost < 0) == (total > 0))
    odd = torch.where((lost != 0) & lost.isfinite(), (bits - away.long()) | 1, bits)
    return odd.view(torch.float64).float()
