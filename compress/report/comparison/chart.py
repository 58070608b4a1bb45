"""Size against loss, a point a result, as inline SVG: names where there is room for them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from compress.report import units
from compress.report.comparison.records import Comparison, Contender
from compress.report.markup import Html, el, join

HEIGHT = 420
WIDE, SLIM = 960, 480  # of a page, and of a telephone's, where names are fewer
LEFT, RIGHT, TOP, BOTTOM = 78, 24, 16, 56
_CHARACTER, _LINE = 7.2, 15.0  # of a name, in pixels, at most
_MARK, _NEAR = 6.0, 10.0
Sides = Sequence[tuple[int, int]]  # of a point: to the right, and up
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
class Box:
    """What is taken of the picture."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        apart = self.right <= other.left or other.right <= self.left
        return not (apart or self.bottom <= other.top or other.bottom <= self.top)


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
    return el(
        "svg",
        _grid(x, y, width),
        limits,
        _front(found, loss, spots),
        *_points(found, loss, spots, [*dots, *labels], width),
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
    parts: list[Html] = []
    taken: list[Box] = []
    if found.wanted.within is not None:
        shown = units.size(found.wanted.within)
        at = x.at(found.wanted.within / x.unit)
        across, wide = f"{at:.1f}", _CHARACTER * len(shown)
        parts.append(el("line", x1=across, x2=across, y1=TOP, y2=HEIGHT - BOTTOM, class_="limit"))
        lefts = [at + 5] if at + 5 + wide <= x.last else [at - 5 - wide]
        taken.append(
            _free([(a, b) for b in (TOP + 6, HEIGHT - BOTTOM - 10) for a in lefts], wide, dots)
        )
        parts.append(_label(shown, taken[-1]))
    if loss.limit is not None:
        shown, at = f"KL {loss.limit:g}", y.at(loss.limit)
        up, wide = f"{at:.1f}", _CHARACTER * len(shown)
        parts.append(el("line", x1=LEFT, x2=x.last, y1=up, y2=up, class_="limit"))
        ends = [(a, at + b) for a in (x.last - 4 - wide, LEFT + 4.0) for b in (-9.0, 11.0)]
        taken.append(_free(ends, wide, [*dots, *taken]))
        parts.append(_label(shown, taken[-1]))
    return join(parts), taken


def _free(places: Sequence[tuple[float, float]], wide: float, taken: Sequence[Box]) -> Box:
    """The first place, of its left end and its middle, where nothing lies; else the first."""
    boxes = [Box(x, y - _LINE / 2, x + wide, y + _LINE / 2) for x, y in places]
    return next((box for box in boxes if not any(map(box.meets, taken))), boxes[0])


def _label(shown: str, box: Box) -> Html:
    middle = (box.top + box.bottom) / 2
    return el("text", shown, x=f"{box.left:.1f}", y=f"{middle:.1f}", dy="0.32em")


def _front(found: Comparison, loss: Loss, spots: Sequence[tuple[float, float]]) -> Html | None:
    """The line through the front, in the order of sizes."""
    pairs = zip(found.contenders, spots, strict=True)
    ends = sorted(spot for one, spot in pairs if loss.leads(one))
    if len(ends) < 2:
        return None
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in ends)
    return el("path", d=path, class_="line front")


def _points(
    found: Comparison,
    loss: Loss,
    spots: Sequence[tuple[float, float]],
    covered: Sequence[Box],
    width: int,
) -> list[Html]:
    """Marks with their names, those of the front first in the choice of a place: above the line,
    which falls. covered: what no name may cover."""
    taken = list(covered)
    order = sorted(
        range(len(spots)),
        key=lambda i: (
            found.contenders[i].name != found.winner,
            not loss.leads(found.contenders[i]),
        ),
    )
    names: dict[int, Html] = {}
    for i in order:
        sides = _UP if loss.leads(found.contenders[i]) else _BESIDE
        placed = _placed(found.contenders[i].name, spots[i], taken, (width, sides))
        if placed is not None:
            names[i], box = placed
            taken.append(box)
    return [
        _point(found, one, loss, spots[i], names.get(i)) for i, one in enumerate(found.contenders)
    ]


def _placed(
    name: str, spot: tuple[float, float], taken: Sequence[Box], where: tuple[int, Sides]
) -> tuple[Html, Box] | None:
    """A name beside its point where nothing else lies; None where there is no such place. where:
    width of the picture, and the sides of the point, the best first."""
    wide, (width, sides) = _CHARACTER * len(name), where
    for away in (_NEAR, 18.0, 28.0):
        for right, up in sides:
            left = spot[0] + (away if right > 0 else -away - wide if right < 0 else -wide / 2)
            middle = spot[1] - up * (away + 2)
            box = Box(left, middle - _LINE / 2, left + wide, middle + _LINE / 2)
            inside = box.left >= LEFT and box.right <= width - RIGHT and box.top >= TOP
            if not inside or box.bottom > HEIGHT - BOTTOM or any(map(box.meets, taken)):
                continue
            x, y = f"{left:.1f}", f"{middle:.1f}"
            shown = el("text", name, x=x, y=y, dy="0.32em", class_="name")
            return join([_leader(spot, box) if away > _NEAR else None, shown]), box
    return None


def _leader(spot: tuple[float, float], box: Box) -> Html:
    """From a point to its name, where that is not next to it."""
    x = min(max(spot[0], box.left), box.right)
    y = min(max(spot[1], box.top), box.bottom)
    ends = [f"{value:.1f}" for value in (*spot, x, y)]
    return el("line", x1=ends[0], y1=ends[1], x2=ends[2], y2=ends[3], class_="leader")


def _point(
    found: Comparison, one: Contender, loss: Loss, spot: tuple[float, float], name: Html | None
) -> Html:
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
