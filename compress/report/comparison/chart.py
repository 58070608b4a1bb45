"""Size against loss, a point a result, as inline SVG: names where there is room for them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from compress.report import units
from compress.report.comparison.places import (
    CHARACTER,
    LINE,
    Box,
    Segment,
    Sides,
    Space,
    Spot,
)
from compress.report.comparison.records import Comparison, Contender
from compress.report.markup import Html, el, join

HEIGHT = 420
WIDE, SLIM = 960, 480  # of a page, and of a telephone's, where names are fewer
LEFT, RIGHT, TOP, BOTTOM = 78, 24, 16, 56
_MARK = 6.0
_BESIDE: Sides = ((1, 0), (0, 1), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))
_UP: Sides = ((1, 1), *(side for side in _BESIDE if side != (1, 1)))
_LOG_FROM = 5.0  # largest over least from which an axis is logarithmic


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps numbers to pixels. first, last: where `low` and `high` lie. title: with the unit.
    unit: of the numbers, in what they are made of."""

    low: float
    high: float
    first: float
    last: float
    log: bool
    title: str
    unit: float = 1.0

    def at(self, value: float) -> float:
        """A number beyond the axis lies at its end."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)

    def ticks(self) -> list[float]:
        """Round numbers on it, ascending."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            factors = (1, 2, 5) if len(powers) <= 4 else (1,)
            found = [factor * 10.0**power for power in powers for factor in factors]
            return [x for x in found if self.low <= x <= self.high]
        raw = (self.high - self.low) / 6
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw)
        count = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        return [i * step for i in count]


@dataclass(frozen=True, slots=True)
class Loss:
    """What is drawn upwards. limit: a number that was asked for."""

    title: str
    of: Callable[[Contender], float]
    leads: Callable[[Contender], bool]
    limit: float | None = None


def axis(values: Sequence[float], first: float, last: float, title: str) -> Axis:
    """Over all values above 0 that are finite, with a little air."""
    seen = [x for x in values if x > 0 and math.isfinite(x)] or [1.0]
    low, high = min(seen), max(seen)
    log = high / low >= _LOG_FROM
    if log:
        low, high = max(low, high * 1e-6), high
        air = (high / low) ** 0.06
        return Axis(low / air, high * air, first, last, True, f"{title} (log)")
    air = 0.08 * (high - low) or 0.1 * high
    return Axis(max(low - air, 0.0), high + air, first, last, False, title)


def scatter(found: Comparison, loss: Loss, width: int = WIDE) -> Html:
    """The picture; every number is in the table, too."""
    sizes = [float(x.bytes) for x in found.contenders]
    within = found.wanted.within
    across = [*sizes, *([] if within is None else [float(within)])]
    losses = [loss.of(x) for x in found.contenders]
    upwards = [*losses, *([] if loss.limit is None else [loss.limit])]
    scale = 1e6 if max(sizes) < 1e9 else 1e9
    unit = "MB" if scale == 1e6 else "GB"
    x = axis([each / scale for each in across], LEFT, width - RIGHT, f"size, {unit}")
    x = replace(x, unit=scale)
    y = axis(upwards, HEIGHT - BOTTOM, TOP, loss.title)
    spots = [(x.at(one.bytes / scale), y.at(loss.of(one))) for one in found.contenders]
    spoken = f"Size against {loss.title}: {len(spots)} results; every number is in the table."
    dots = [Box(at - _MARK, up - _MARK, at + _MARK, up + _MARK) for at, up in spots]
    limits, labels = _limits(found, loss, (x, y), dots)
    inside = Box(LEFT, TOP, width - RIGHT, HEIGHT - BOTTOM)
    lines = [*pairwise(_ends(found, loss, spots)), *_limit_lines(found, loss, (x, y))]
    return el(
        "svg",
        _grid(x, y, width),
        limits,
        _front(found, loss, spots),
        *_points(found, loss, spots, Space(inside, [*dots, *labels], lines)),
        viewBox=f"0 0 {width} {HEIGHT}",
        role="img",
        aria_label=spoken,
    )


def _grid(x: Axis, y: Axis, width: int) -> Html:
    parts: list[Html] = []
    for tick in y.ticks():
        at = f"{y.at(tick):.1f}"
        parts.append(el("line", x1=LEFT, x2=width - RIGHT, y1=at, y2=at, class_="grid"))
        shown = units.trimmed(tick, 3)
        parts.append(el("text", shown, x=LEFT - 10, y=at, dy="0.32em", text_anchor="end"))
    for tick in x.ticks():
        at = f"{x.at(tick):.1f}"
        parts.append(el("line", x1=at, x2=at, y1=TOP, y2=HEIGHT - BOTTOM, class_="grid"))
        shown = units.trimmed(tick, 3)
        parts.append(el("text", shown, x=at, y=HEIGHT - BOTTOM + 18, text_anchor="middle"))
    middle = (LEFT + width - RIGHT) / 2
    parts.append(el("text", x.title, x=middle, y=HEIGHT - 10, text_anchor="middle", class_="axis"))
    turned = f"translate(16 {(TOP + HEIGHT - BOTTOM) / 2:.1f}) rotate(-90)"
    parts.append(el("text", y.title, transform=turned, text_anchor="middle", class_="axis"))
    return join(parts)


def _limits(
    found: Comparison, loss: Loss, axes: tuple[Axis, Axis], dots: Sequence[Box]
) -> tuple[Html, list[Box]]:
    """Dashed lines at what was asked for, each with its number at an end where no point is; and
    what the numbers take."""
    x, y = axes
    parts = [_line(line, "limit") for line in _limit_lines(found, loss, axes)]
    taken: list[Box] = []
    if found.wanted.within is not None:
        shown = units.size(found.wanted.within)
        at = x.at(found.wanted.within / x.unit)
        wide = CHARACTER * len(shown)
        lefts = [at + 5] if at + 5 + wide <= x.last else [at - 5 - wide]
        taken.append(
            _free([(a, b) for b in (TOP + 6, HEIGHT - BOTTOM - 10) for a in lefts], wide, dots)
        )
        parts.append(_label(shown, taken[-1]))
    if loss.limit is not None:
        shown, at = f"KL {loss.limit:g}", y.at(loss.limit)
        wide = CHARACTER * len(shown)
        ends = [(a, at + b) for a in (x.last - 4 - wide, LEFT + 4.0) for b in (-9.0, 11.0)]
        taken.append(_free(ends, wide, [*dots, *taken]))
        parts.append(_label(shown, taken[-1]))
    return join(parts), taken


def _limit_lines(found: Comparison, loss: Loss, axes: tuple[Axis, Axis]) -> list[Segment]:
    """Across the picture, at what was asked for."""
    (x, y), lines = axes, list[Segment]()
    if found.wanted.within is not None:
        at = x.at(found.wanted.within / x.unit)
        lines.append(((at, y.last), (at, y.first)))
    if loss.limit is not None:
        at = y.at(loss.limit)
        lines.append(((x.first, at), (x.last, at)))
    return lines


def _line(line: Segment, kind: str) -> Html:
    x1, y1, x2, y2 = (f"{value:.1f}" for end in line for value in end)
    return el("line", x1=x1, x2=x2, y1=y1, y2=y2, class_=kind)


def _free(places: Sequence[Spot], wide: float, taken: Sequence[Box]) -> Box:
    """The first place, of its left end and its middle, where nothing lies; else the first."""
    boxes = [Box(x, y - LINE / 2, x + wide, y + LINE / 2) for x, y in places]
    return next((box for box in boxes if not any(map(box.meets, taken))), boxes[0])


def _label(shown: str, box: Box) -> Html:
    middle = (box.top + box.bottom) / 2
    return el("text", shown, x=f"{box.left:.1f}", y=f"{middle:.1f}", dy="0.32em")


def _ends(found: Comparison, loss: Loss, spots: Sequence[Spot]) -> list[Spot]:
    """Points of the front, in the order of sizes."""
    pairs = zip(found.contenders, spots, strict=True)
    return sorted(spot for one, spot in pairs if loss.leads(one))


def _front(found: Comparison, loss: Loss, spots: Sequence[Spot]) -> Html | None:
    """The line through the front."""
    ends = _ends(found, loss, spots)
    if len(ends) < 2:
        return None
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in ends)
    return el("path", d=path, class_="line front")


def _points(found: Comparison, loss: Loss, spots: Sequence[Spot], space: Space) -> list[Html]:
    """Marks with their names. The winner chooses its place first, then the front, off the lines;
    then from top to bottom, so that names of a column stand in the order of its points, which need
    all places beside it, those on lines too."""
    contenders, taken = found.contenders, list(space.taken)
    names: dict[int, Html] = {}

    def turn(i: int) -> tuple[bool, bool, float]:
        one = contenders[i]
        return one.name != found.winner, not loss.leads(one), spots[i][1]

    for i in sorted(range(len(spots)), key=turn):
        sides, lines = (_UP, space.lines) if loss.leads(contenders[i]) else (_BESIDE, ())
        placed = Space(space.inside, taken, lines).place(contenders[i].name, spots[i], sides)
        if placed is not None:
            names[i] = _named(contenders[i].name, spots[i], *placed)
            taken.append(placed[0])
    return [_point(found, one, loss, spots[i], names.get(i)) for i, one in enumerate(contenders)]


def _named(name: str, spot: Spot, box: Box, near: bool) -> Html:
    x, y = f"{box.left:.1f}", f"{(box.top + box.bottom) / 2:.1f}"
    shown = el("text", name, x=x, y=y, dy="0.32em", class_="name")
    return join([None if near else _leader(spot, box), shown])


def _leader(spot: Spot, box: Box) -> Html:
    """From a point to its name, where that is not next to it."""
    x = min(max(spot[0], box.left), box.right)
    y = min(max(spot[1], box.top), box.bottom)
    return _line((spot, (x, y)), "leader")


def _point(found: Comparison, one: Contender, loss: Loss, spot: Spot, name: Html | None) -> Html:
    x, y = spot
    kind = "mark" if loss.leads(one) else "mark kept"
    hint = (
        f"{one.name}\n{units.size(one.bytes)}, KL {units.significant(one.kl)}, perplexity"
        f" {units.significant(one.perplexity, 4)}"
    )
    won = one.name == found.winner
    ring = el("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=9, class_="ring") if won else None
    dot = el("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=_MARK - 1, class_=kind)
    return el("g", el("title", hint), ring, dot, name, class_="c1" if won else "c0")
