"""The search for a block's scales, minima and codes.

Weighted squared errors are what is lost, and a number of a sub-block is step * q - offset with q a
level. Three parts: the grid of each sub-block for itself (`sub_grids`); d and dmin for which whole
numbers come nearest to those grids (`first_choice`); and rounds in which whole numbers and codes
are chosen anew for d and dmin as they are stored (`nearby`), and d and dmin for those (`refit`).

Sums are made number by number in the order of the columns: csrc/blocks does the same on tiles of
rows, so that both give the same bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress_kernels.blocks.layouts import BlockLayout
from compress_kernels.blocks.search import BlockSearch

# Of levels of each number: fp32, the shape of what is given.
Levels = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class BlockView:
    """M blocks. x, w: numbers and what their squared errors weigh, fp32 [M, subs, sub]. total: of
    the weights of each sub-block, weighted: of the weighted numbers, fp32 [M, subs]."""

    layout: BlockLayout
    levels: Levels
    x: Tensor
    w: Tensor
    total: Tensor
    weighted: Tensor

    @property
    def free(self) -> bool:
        """Whether an offset may be below 0: where it is the block's own."""
        return self.layout.minima == 1


@dataclass(frozen=True, slots=True, eq=False)
class SharedScales:
    """d, dmin: fp32 [M], exact in fp16. scale, minimum: whole numbers, fp32 [M, subs]. loss: fp32
    [M]."""

    d: Tensor
    dmin: Tensor
    scale: Tensor
    minimum: Tensor
    loss: Tensor

    def grid(self) -> tuple[Tensor, Tensor]:
        """Step and offset of each sub-block, fp32 [M, subs]."""
        return self.d[:, None] * self.scale, self.dmin[:, None] * self.minimum


def find_scales(
    layout: BlockLayout, levels: Levels, x: Tensor, w: Tensor, search: BlockSearch
) -> SharedScales:
    """Scales for the numbers x of M blocks, whose squared errors weigh w: fp32 [M, subs, sub]."""
    view = BlockView(layout, levels, x, w, added(w), added(w * x))
    now = first_choice(view, search, *sub_grids(view, search))
    best = now = nearby(view, search.reach, now)
    for _ in range(search.shared_rounds - 1):
        now = nearby(view, search.reach, refit(view, now))
        best = _where(now.loss < best.loss, now, best)
    return best


def added(values: Tensor) -> Tensor:
    """Sums over the last axis, one number after the other."""
    total = torch.zeros_like(values[..., 0])
    for part in values.unbind(-1):
        total = total + part
    return total


def inverse_of(step: Tensor) -> Tensor:
    return torch.where(step == 0, 0.0, 1.0 / step)


def round_half(x: Tensor) -> Tensor:
    """The nearest number of fp16, the largest in place of what is beyond."""
    return x.clamp(-65504, 65504).to(torch.float16).float()


def sub_grids(view: BlockView, search: BlockSearch) -> tuple[Tensor, Tensor]:
    """The best step and offset of each sub-block, in full precision: fp32 [M, subs]."""
    low, high = view.x.amin(2), view.x.amax(2)
    extreme = torch.where(high > -low, high, low)
    low = low if view.free else low.clamp(max=0)
    steps = float((1 << view.layout.bits) - 1)
    best = (torch.zeros_like(low), torch.zeros_like(low), torch.full_like(low, -1e38))
    for first, second in zip(search.first, search.second, strict=True):
        if view.layout.minima:
            offset = -(low * first)
            inverse = inverse_of((high * second + offset) / steps)
        else:
            offset, inverse = torch.zeros_like(low), inverse_of(extreme * first)
        best = _better_grid(view, inverse, offset, best)
    for _ in range(search.rounds):
        best = _better_grid(view, inverse_of(best[0]), best[1], best)
    return best[0], best[1]


_GridGain = tuple[Tensor, Tensor, Tensor]


def _better_grid(view: BlockView, inverse: Tensor, offset: Tensor, best: _GridGain) -> _GridGain:
    """The grid that suits the codes of another one, where it gains more."""
    found = fit(view, *_sums(view, inverse, offset))
    better = found[2] > best[2]
    step, offset, gain = (
        torch.where(better, new, old) for new, old in zip(found, best, strict=True)
    )
    return step, offset, gain


def _sums(view: BlockView, inverse: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sums of levels, their squares and their products with x: fp32 [M, subs]."""
    q = view.levels((view.x + offset[..., None]) * inverse[..., None])
    weighted = view.w * q
    return added(weighted), added(weighted * q), added(weighted * view.x)


def fit(view: BlockView, q: Tensor, qq: Tensor, qx: Tensor) -> _GridGain:
    """Step and offset that suit levels best, and by how much less is lost than with zeros."""
    alone = torch.where(qq > 0, qx / qq, 0.0)
    if not view.layout.minima:
        return alone, torch.zeros_like(alone), alone * qx
    spread = view.total * qq - q * q
    apart = spread > 1e-6 * (view.total * qq)
    step = torch.where(apart, (view.total * qx - q * view.weighted) / spread, 0.0)
    offset = torch.where(view.total > 0, (step * q - view.weighted) / view.total, 0.0)
    better = (step >= 0) if view.free else (step >= 0) & (offset >= 0)
    alone = alone.clamp(min=0)
    gain = torch.where(better, step * qx - offset * view.weighted, alone * qx)
    return torch.where(better, step, alone), torch.where(better, offset, 0.0), gain


def first_choice(
    view: BlockView, search: BlockSearch, step: Tensor, offset: Tensor
) -> SharedScales:
    """d, and dmin, for which the grids that sub-blocks want are met best, their codes unchanged."""
    sums = _sums(view, inverse_of(step), offset)
    largest, most = _largest(step), _largest(offset)
    zero = torch.zeros_like(largest)
    best = SharedScales(zero, zero, torch.zeros_like(step), torch.zeros_like(step), zero + 1e38)
    for ratio in search.scale_ratios:
        d = round_half(largest * ratio)
        scale = (step * inverse_of(d)[:, None]).clamp(*view.layout.scale_range).round()
        for other in search.minimum_ratios if view.layout.minima else zero[:1]:
            now = SharedScales(d, round_half(most * other), scale, torch.zeros_like(scale), zero)
            now = _with_minima(view, now, *sums)
            best = _where(now.loss < best.loss, now, best)
    return best


def _with_minima(
    view: BlockView, now: SharedScales, q: Tensor, qq: Tensor, qx: Tensor
) -> SharedScales:
    """The whole minima that suit scales best, and the loss without what no choice changes."""
    step = now.grid()[0]
    base = added(step * (step * qq - (qx + qx)))
    if not view.layout.minima:
        return replace(now, loss=base)
    minimum = torch.ones_like(step)
    if not view.free:
        wanted = torch.where(view.total > 0, (step * q - view.weighted) / view.total, 0.0)
        minimum = (wanted * inverse_of(now.dmin)[:, None]).clamp(0, view.layout.minima).round()
    offset, both = now.dmin[:, None] * minimum, view.weighted - step * q
    losses = offset * (offset * view.total + (both + both))
    return replace(now, minimum=minimum, loss=added(torch.cat((base[:, None], losses), 1)))


def nearby(view: BlockView, reach: int, now: SharedScales) -> SharedScales:
    """New whole numbers, up to `reach` from the ones that are there, codes chosen anew for each."""
    low, high = view.layout.scale_range
    by = 0 if low == high else reach
    across = reach if view.layout.minima > 1 else 0
    best = torch.full_like(now.scale, 1e38)
    scale, minimum = now.scale, now.minimum
    for ds in range(-by, by + 1):
        s = (now.scale + ds).clamp(low, high)
        for dm in range(-across, across + 1):
            m = (now.minimum + dm).clamp(0, view.layout.minima) if across else now.minimum
            loss = _losses(view, now.d[:, None] * s, now.dmin[:, None] * m)
            better = loss < best
            scale, minimum = torch.where(better, s, scale), torch.where(better, m, minimum)
            best = torch.where(better, loss, best)
    return SharedScales(now.d, now.dmin, scale, minimum, added(best))


def _losses(view: BlockView, step: Tensor, offset: Tensor) -> Tensor:
    """Weighted squared errors, fp32 [M, subs]."""
    s, o = step[..., None], offset[..., None]
    q = view.levels((view.x + o) * inverse_of(s))
    error = view.x - (s * q - o)
    return added(view.w * (error * error))


def refit(view: BlockView, now: SharedScales) -> SharedScales:
    """d and dmin that suit whole numbers and codes best: least squares over the block."""
    step, offset = now.grid()
    q, qq, qx = _sums(view, inverse_of(step), offset)
    scale, minimum = now.scale, now.minimum
    aa, ax = added(scale * scale * qq), added(scale * qx)
    alone = torch.where(aa > 0, ax / aa, now.d)
    if not view.layout.minima:
        return replace(now, d=round_half(alone))
    ab, bb = added(scale * minimum * q), added(minimum * minimum * view.total)
    bx = added(minimum * view.weighted)
    spread = aa * bb - ab * ab
    apart = spread > 1e-6 * (aa * bb)
    d = torch.where(apart, (ax * bb - bx * ab) / spread, alone)
    dmin = torch.where(apart, (d * ab - bx) / bb, 0.0)
    better = apart if view.free else apart & (dmin >= 0)
    return replace(
        now,
        d=round_half(torch.where(better, d, alone)),
        dmin=round_half(torch.where(better, dmin, 0.0)),
    )


def _largest(values: Tensor) -> Tensor:
    """The one of largest magnitude, the first of several: fp32 [M] of [M, subs]."""
    largest = torch.zeros_like(values[:, 0])
    for part in values.unbind(1):
        largest = torch.where(part.abs() > largest.abs(), part, largest)
    return largest


def _where(better: Tensor, new: SharedScales, old: SharedScales) -> SharedScales:
    rows = better[:, None]
    return SharedScales(
        torch.where(better, new.d, old.d),
        torch.where(better, new.dmin, old.dmin),
        torch.where(rows, new.scale, old.scale),
        torch.where(rows, new.minimum, old.minimum),
        torch.where(better, new.loss, old.loss),
    )
