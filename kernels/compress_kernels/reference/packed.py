"""Rows times codes in panels, in plain torch: what each math computes, to the bit."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from compress_kernels.panels import (
    RUN,
    Panels,
    by_output,
    codes_of,
    decoded,
    levels_of,
    steps,
    taken_away,
)
from compress_kernels.rounding import FloatRounding, RowRounding

# What the largest number of a run is rounded to. In two planes of bytes, 256 * high + low.
LARGEST = {"int16": 32512.0, "int8": 127.0}
LEAST = 1e-30  # smaller numbers are 0
E4M3_MAX = 448.0


def packed_linear(
    x: Tensor,
    panels: Panels,
    bias: Tensor | None,
    math: str,
    rounding: RowRounding | FloatRounding | None = None,
) -> Tensor:
    """As packed.packed_linear, arguments checked."""
    if math == "exact":
        return linear(x, decoded(panels).to(x.dtype), bias)
    if panels.columns is not None:
        x = x[:, panels.columns.long()]
    if isinstance(rounding, FloatRounding):
        total = _float_rows(x, panels, rounding)
    else:
        total = _runs(x, panels, math) if rounding is None else _whole_rows(x, panels, rounding)
    return total if bias is None else total + bias


def _runs(x: Tensor, panels: Panels, math: str) -> Tensor:
    k, total = x.shape[1], x.new_zeros(len(x), panels.shape[0])
    run, part = min(RUN, panels.group), _WholeCodes(panels)
    for start in range(0, k, run):
        columns = slice(start, start + run)
        whole, worth = rounded_run(x[:, columns], LARGEST[math])
        total = part.add(total, whole, worth, columns)
    return total


def _whole_rows(x: Tensor, panels: Panels, rounding: RowRounding) -> Tensor:
    k, total = x.shape[1], x.new_zeros(len(x), panels.shape[0])
    whole, worth, kept = rounded_rows(x, rounding)
    group, part = min(panels.group, k), _WholeCodes(panels)
    for start in range(0, k, group):
        columns = slice(start, start + group)
        total = part.add(total, whole[:, columns], worth, columns)
    for column in kept.any(0).nonzero()[:, 0].tolist():
        own = slice(column, column + 1)
        number = part.codes(own)[:, 0].float() * part.steps[:, column // group]
        more = _fma(number.expand_as(total), x[:, own].expand_as(total), total)
        total = torch.where(kept[:, own], more, total)
    return total


def _float_rows(x: Tensor, panels: Panels, rounding: FloatRounding) -> Tensor:
    """Of each run two sums, of columns 2, 0, 6, 4, ... and of 3, 1, 7, 5, ...: products of codes
    are exact in fp32."""
    k, total = x.shape[1], x.new_zeros(len(x), panels.shape[0])
    codes = codes_of(panels).float()
    if panels.columns is not None:
        codes = codes[:, panels.columns.long()]
    step, group = steps(panels), rounding.group or k
    run = min(panels.group, group, k)
    for start in range(0, k, run):
        first = start // group * group
        worth = _float_worth(x[:, first : first + group], rounding)  # [M]
        own = (x[:, start : start + run] / worth[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
        own = own.to(torch.float8_e4m3fn).float()
        sums = [torch.zeros_like(total) for _ in range(2)]
        for four in range(0, run, 4):
            for column in (2, 0, 3, 1):
                at = four + column
                if at < own.shape[1]:
                    sums[column % 2] += own[:, [at]] * codes[:, start + at]
        scale = worth[:, None] * step[:, start // panels.group]
        total = _fma(sums[0] + sums[1], scale, total)
    return total


def _float_worth(x: Tensor, rounding: FloatRounding) -> Tensor:
    """What a code of columns that share a scale is worth, [M]; NaN where one of them is NaN, or
    infinite and the scale comes from it."""
    if rounding.scale is not None:
        return torch.where(x.isnan().any(1), torch.nan, rounding.scale)
    top = x.abs().amax(1)
    worth = torch.where(top < torch.inf, top, torch.nan) / E4M3_MAX
    return torch.where(worth == 0, torch.finfo(torch.float32).eps, worth)


class _WholeCodes:
    """Codes without their zeros; of E2M1 twice of them, which are whole numbers."""

    def __init__(self, panels: Panels) -> None:
        twice = panels.kind == "e2m1"
        codes = (levels_of(panels) * (2 if twice else 1)).long()
        if panels.columns is not None:
            codes = codes[:, panels.columns.long()]
        self.all, self.group = codes, panels.group
        self.steps = steps(replace(panels, factor=panels.factor / 2) if twice else panels)
        zeros, self.minima = panels.zeros, taken_away(panels)
        self.zeros = None if zeros is None else by_output(zeros, panels.shape[0]).long()

    def codes(self, columns: slice) -> Tensor:
        """Of columns of one group: int64 [N, columns]."""
        codes = self.all[:, columns]
        return codes if self.zeros is None else codes - self.zeros[:, [columns.start // self.group]]

    def add(self, total: Tensor, whole: Tensor, worth: Tensor, columns: slice) -> Tensor:
        """whole: int64 [M, columns], each worth so much [M]. Of one group. Its minimum is times
        the sum of the inputs, behind the codes."""
        group = columns.start // self.group
        found = _fma(
            (whole @ self.codes(columns).T).float(), worth[:, None] * self.steps[:, group], total
        )
        if self.minima is None:
            return found
        inputs = (whole.sum(1).float() * worth)[:, None].expand(total.shape)
        return _fma(-self.minima[:, group].expand(total.shape), inputs, found)


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


def rounded_rows(x: Tensor, how: RowRounding) -> tuple[Tensor, Tensor, Tensor]:
    """x: fp32 [M, K] -> whole numbers int64 [M, K], what each is worth [M], which numbers are left
    as they are, bool [M, K], and 0 among the whole ones. A row that is not finite is worth NaN."""
    kept = torch.zeros_like(x, dtype=torch.bool)
    low, high = -(how.largest + 0.5), how.largest - 0.5
    if how.kind == "fixed":
        worth = torch.where(x.isnan().any(1), torch.nan, how.scale)
        whole = (x / worth[:, None]).clamp(low, high)
        return _integers(whole), worth, kept
    if how.kind == "outliers":
        seen = x.half().float()
        kept = seen.abs() >= how.threshold
        x = seen.masked_fill(kept, 0)
    top = x.abs().amax(1)
    top = torch.where(top < torch.inf, top, torch.nan)
    if how.kind == "token":
        worth = top / how.largest
        worth = torch.where(worth == 0, torch.finfo(torch.float32).eps, worth)
        return _integers((x / worth[:, None]).clamp(low, high)), worth, kept
    most = torch.where(top == 0, 1.0, top)
    factor = most.reciprocal() * how.largest
    return _integers(x * factor[:, None]), most / how.largest, kept


def _integers(x: Tensor) -> Tensor:
    return x.round().nan_to_num(0.0).long()


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
