"""The error of every layer: block on x, error on y, one line a role, as inline SVG."""

import math
from dataclasses import dataclass

from compress.report import units
from compress.report.markup import Html, el, join
from compress.report.parts import section
from compress.report.schema import Layer, Report

WIDTH, HEIGHT = 960, 340
LEFT, RIGHT, TOP, BOTTOM = 84, 16, 14, 44
_NOTHING = 1e-30

# Path data around (0, 0): shapes tell roles apart where colours do not.
_MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
    "M-3.6 -3.6h7.2v7.2h-7.2Z",
    "M0 -4.6L4.4 3.4h-8.8Z",
    "M0 -5L5 0L0 5L-5 0Z",
    "M0 4.6L4.4 -3.4h-8.8Z",
    "M-1.5 -4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3Z",
    "M-5 -2.6h10v5.2h-10Z",
    "M-2.6 -5h5.2v10h-5.2Z",
)


@dataclass(frozen=True, slots=True)
class Point:
    """The layers of one role in one block: experts share a point. kept: a simpler method stayed."""

    block: int
    error: float
    worst: float
    layers: tuple[Layer, ...]

    @property
    def kept(self) -> bool:
        return any(layer.kept_reason for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps errors to heights: by their logarithm when they span more than a factor of ten."""

    low: float
    high: float
    log: bool

    def y(self, error: float) -> float:
        """Pixels from the top; an error below the scale (0 on a log scale) lies on its floor."""
        value = max(error, self.low)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)


def errors(report: Report) -> Html | None:
    """The chart section; None when no layer of a block has an error to show."""
    series = points(report.layers)
    if not series:
        return None
    calibrated = any(layer.tokens for layer in report.layers if layer.error is not None)
    measure = "output" if calibrated else "weight"
    note = (
        f"Share of each layer's {measure} energy that compression changed"
        f"{', on the calibration data' if calibrated else ''}. Lower is better."
    )
    body = el("figure", _legend(series), el("div", _svg(series, measure), class_="scroll plot"))
    return section("errors", "Error of each layer", body, note=note)


def points(layers: tuple[Layer, ...]) -> dict[str, list[Point]]:
    """role -> points by block, for layers that have a block and a finite error."""
    cells: dict[tuple[str, int], dict[str, Layer]] = {}
    for layer in layers:
        if layer.block is None or layer.error is None or not math.isfinite(layer.error):
            continue
        # By name: a later stage replaces what an earlier one said of the same layer.
        cells.setdefault((layer.role or "linear", layer.block), {})[layer.name] = layer
    series: dict[str, list[Point]] = {}
    for (role, block), group in cells.items():
        found = [layer.error for layer in group.values() if layer.error is not None]
        mean = sum(found) / len(found)
        point = Point(block, mean, max(found), tuple(group.values()))
        series.setdefault(role, []).append(point)
    return {role: sorted(line, key=lambda p: p.block) for role, line in series.items()}


def scale_of(values: list[float]) -> Scale:
    """A scale with a little air around the values; at most six decades, the rest on its floor."""
    positive = [value for value in values if value > _NOTHING]
    if not positive:
        return Scale(0.0, 1.0, log=False)
    high = max(positive)
    low = max(min(positive), high * 1e-6)
    if high / low >= 10:
        return Scale(low / 1.3, high * 1.3, log=True)
    return Scale(0.0, high * 1.1, log=False)


def ticks(scale: Scale) -> list[float]:
    """Round numbers inside the scale, ascending."""
    if not scale.log:
        raw = scale.high / 4
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw)
        return [step * i for i in range(int(scale.high / step) + 1)]
    first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    every = [f * 10.0**power for power in range(first, last + 1) for f in factors]
    return [tick for tick in every if scale.low <= tick <= scale.high]


def axis_title(what: str, unit: str | None = None, *, log: bool = False) -> str:
    """ "error, share of output energy (log)": what an axis shows, in what, and how it is cut."""
    return (what if unit is None else f"{what}, {unit}") + (" (log)" if log else "")


def axis_titles(x: str, y: str) -> Html:
    """Both titles of a chart of WIDTH by HEIGHT: below the numbers of x, turned beside those of
    y."""
    middle, centre = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    at = {"text_anchor": "middle", "class_": "axis"}
    below = el("text", x, x=f"{middle:g}", y=HEIGHT - 6, **at)
    return join([below, el("text", y, transform=f"translate(16 {centre:g}) rotate(-90)", **at)])


def _svg(series: dict[str, list[Point]], measure: str) -> Html:
    """measure: what the errors are shares of the energy of, "output" or "weight"."""
    values = [point.error for line in series.values() for point in line]
    scale = scale_of(values)
    blocks = sorted({point.block for line in series.values() for point in line})
    lines = [
        _line(place, role, line, blocks, scale) for place, (role, line) in enumerate(series.items())
    ]
    spoken = (
        f"Error by block for {', '.join(series)}: {units.significant(min(values))} to"
        f" {units.significant(max(values))}; every value is in the table of layers."
    )
    return el(
        "svg",
        _grid(scale),
        _blocks(blocks),
        axis_titles(
            axis_title("decoder block", "number"),
            axis_title("error", f"share of {measure} energy", log=scale.log),
        ),
        *lines,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=spoken,
    )


def _x(block: int, blocks: list[int]) -> float:
    first, last = blocks[0], blocks[-1]
    inner = WIDTH - LEFT - RIGHT - 40
    share = 0.5 if first == last else (block - first) / (last - first)
    return LEFT + 20 + share * inner


def _grid(scale: Scale) -> Html:
    parts = []
    for tick in ticks(scale):
        y = f"{scale.y(tick):.1f}"
        parts.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        shown = units.trimmed(tick, 2)
        parts.append(el("text", shown, x=LEFT - 10, y=y, dy="0.32em", text_anchor="end"))
    return join(parts)


def _blocks(blocks: list[int]) -> Html:
    step = -(-(blocks[-1] - blocks[0] + 1) // 16)
    y = HEIGHT - BOTTOM + 18
    marks = [
        el("text", str(block), x=f"{_x(block, blocks):.1f}", y=y, text_anchor="middle")
        for block in blocks
        if (block - blocks[0]) % step == 0
    ]
    return join(marks)


def _line(place: int, role: str, line: list[Point], blocks: list[int], scale: Scale) -> Html:
    spots = [(_x(p.block, blocks), scale.y(p.error)) for p in line]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
    # Markers of full size would hide the lines of a deep model.
    zoom = 1 if len(blocks) <= 32 else 0.65
    pairs = zip(line, spots, strict=True)
    marks = [_mark(place, _hint(role, point), point.kept, spot, zoom) for point, spot in pairs]
    stroke = el("path", d=path, class_="line") if len(line) > 1 else None
    return el("g", stroke, *marks, class_=f"series c{place % 8}", data_series=place)


def _mark(place: int, hint: str, kept: bool, spot: tuple[float, float], zoom: float) -> Html:
    x, y = spot
    return el(
        "g",
        el("title", hint),
        el("circle", r=9, class_="target"),
        el("path", d=_MARKERS[place % 8], class_="mark kept" if kept else "mark"),
        transform=f"translate({x:.1f} {y:.1f}) scale({zoom})",
    )


def _hint(role: str, point: Point) -> str:
    shown = units.significant(point.error)
    first = point.layers[0]
    if len(point.layers) == 1:
        reason = f"\n{first.kept_reason}" if first.kept_reason else ""
        return f"{first.name}\nerror {shown}, {first.method} {first.scheme}{reason}"
    worst = units.significant(point.worst)
    kept = sum(1 for layer in point.layers if layer.kept_reason)
    more = f", {kept} with a simpler method" if kept else ""
    return (
        f"block {point.block}, {role}: {len(point.layers)} layers\n"
        f"mean error {shown}, worst {worst}{more}"
    )


def _legend(series: dict[str, list[Point]]) -> Html:
    items = [
        el("li", _key(place, "mark"), role, class_=f"c{place % 8}", data_series=place)
        for place, role in enumerate(series)
    ]
    if any(point.kept for line in series.values() for point in line):
        items.append(el("li", _key(0, "mark kept"), "hollow: a simpler method was kept"))
    return el("ul", *items, class_="legend")


def _key(place: int, kind: str) -> Html:
    mark = el("path", d=_MARKERS[place % 8], class_=kind)
    return el("svg", mark, viewBox="-6 -6 12 12", aria_hidden="true", class_="key")
