"""Panels of marks over two logarithmic axes, as SVG. Standard library only."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, TOP = 760, 360, 60, 40
INNER_WIDTH, INNER_HEIGHT = 480, 270
COLOURS = {
    "source": "#222222",
    "gqa": "#1b7837",
    "gqa, other pools": "#a6dba0",
    "hybrid": "#b35806",
    "mla": "#2166ac",
    "mla, stride": "#67a9cf",
    "TransMLA's start": "#b2182b",
}
SHAPES = ("bf16", "int8", "fp8")  # a circle, a square, a triangle


@dataclass(frozen=True, slots=True)
class Dot:
    """x: bytes a token. y: perplexity. family, kind: its colour and its shape. full: filled."""

    x: float
    y: float
    family: str
    kind: str
    full: bool


@dataclass(frozen=True, slots=True)
class Axis:
    """low to high becomes 0 to 1, by the logarithm."""

    low: float
    high: float

    def at(self, value: float) -> float:
        return math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self, base: float) -> Iterator[float]:
        """low, and base times that, and so on."""
        tick = self.low
        while tick <= self.high * 1.0001:
            yield tick
            tick *= base


def panel(title: str, dots: Sequence[Dot], highest: float) -> str:
    """One chart. highest: perplexity above which nothing is drawn."""
    lowest = min(dot.y for dot in dots) * 0.97
    across = Axis(256.0, 8192.0)
    up = Axis(lowest, highest)
    parts = [f'<text x="{LEFT}" y="24" font-weight="bold">{escape(title)}</text>']
    parts += _axes(across, up)
    shown = [dot for dot in dots if dot.y <= highest]
    parts += [_dot(LEFT + INNER_WIDTH * across.at(d.x), _height(up, d.y), d) for d in shown]
    parts += _legend()
    left_out = len(dots) - len(shown)
    if left_out:
        note = f"{left_out} marks lie above {highest:g}"
        parts.append(f'<text x="{LEFT + 8}" y="{TOP + 16}" fill="#777">{note}</text>')
    return "\n".join(parts)


def picture(panels: Sequence[str]) -> str:
    """Panels below each other."""
    placed = (
        f'<g transform="translate(0,{i * HEIGHT})">\n{one}\n</g>' for i, one in enumerate(panels)
    )
    size = f'width="{WIDTH}" height="{HEIGHT * len(panels)}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    )
    ground = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, ground, *placed, "</svg>"]) + "\n"


def _height(up: Axis, value: float) -> float:
    return TOP + INNER_HEIGHT * (1 - up.at(value))


def _axes(across: Axis, up: Axis) -> Iterator[str]:
    frame = f'x="{LEFT}" y="{TOP}" width="{INNER_WIDTH}" height="{INNER_HEIGHT}"'
    yield f'<rect {frame} fill="none" stroke="#999"/>'
    bottom = TOP + INNER_HEIGHT
    for value in across.ticks(2):
        x = LEFT + INNER_WIDTH * across.at(value)
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#eee"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>'
    for value in up.ticks((up.high / up.low) ** 0.2):
        y = _height(up, value)
        right = LEFT + INNER_WIDTH
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#eee"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'
    middle = LEFT + INNER_WIDTH / 2
    yield (
        f'<text x="{middle}" y="{bottom + 34}" text-anchor="middle">'
        "bytes of keys and values a token; up: perplexity</text>"
    )


def _dot(x: float, y: float, dot: Dot) -> str:
    colour = COLOURS[dot.family]
    look = f'fill="{colour if dot.full else "none"}" stroke="{colour}" stroke-width="1.6"'
    if dot.kind == SHAPES[0]:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" {look}/>'
    if dot.kind == SHAPES[1]:
        return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" {look}/>'
    corners = f"{x:.1f},{y - 5:.1f} {x - 5:.1f},{y + 4:.1f} {x + 5:.1f},{y + 4:.1f}"
    return f'<polygon points="{corners}" {look}/>'


def _legend() -> Iterator[str]:
    x, y = LEFT + INNER_WIDTH + 24, TOP + 8
    rows = [(name, Dot(1, 1, name, SHAPES[0], full=True)) for name in COLOURS]
    rows += [(f"cache in {kind}", Dot(1, 1, "source", kind, full=False)) for kind in SHAPES]
    rows.append(("trained", Dot(1, 1, "source", SHAPES[0], full=True)))
    for i, (name, dot) in enumerate(rows):
        yield _dot(x, y + 20 * i, dot)
        yield f'<text x="{x + 14}" y="{y + 20 * i + 4}">{escape(name)}</text>'
