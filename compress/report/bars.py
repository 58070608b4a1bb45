"""Where the bytes are: two stacked bars on one scale, and the numbers below them."""

from compress.report import units
from compress.report.markup import Html, el, join
from compress.report.parts import Cell, Column, number, section, table
from compress.report.schema import Report, SizePart

_WIDTH, _HEIGHT, _GAP = 1000, 40, 2


def sizes(report: Report) -> Html | None:
    """The size section; None when the report has no breakdown."""
    parts = report.result.sizes
    if not parts:
        return None
    longest = max(sum(part.bytes_before for part in parts), sum(part.bytes_after for part in parts))
    bars = el(
        "div",
        _bar("Before", parts, [part.bytes_before for part in parts], longest),
        _bar("After", parts, [part.bytes_after for part in parts], longest),
        class_="bars",
    )
    return section("sizes", "Where the bytes are", bars, _numbers(parts))


def _bar(name: str, parts: tuple[SizePart, ...], values: list[int], longest: int) -> Html:
    total = sum(values)
    shares = [value / longest * _WIDTH if longest else 0.0 for value in values]
    start, pieces = 0.0, []
    for place, (part, value, width) in enumerate(zip(parts, values, shares, strict=True)):
        hint = f"{part.name}: {units.size(value)}"
        if width > 0:
            # A hair between the pieces, but never so much that a thin piece vanishes.
            shown = max(width - _GAP, min(width, 1.0))
            pieces.append(
                el(
                    "rect",
                    el("title", hint),
                    x=f"{start:.2f}",
                    y=0,
                    height=_HEIGHT,
                    width=f"{shown:.2f}",
                    class_=_colour(place),
                )
            )
        start += width
    spoken = ", ".join(
        f"{part.name} {units.size(value)}" for part, value in zip(parts, values, strict=True)
    )
    chart = el(
        "svg",
        join(pieces),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{name}: {spoken}",
    )
    return el(
        "div",
        el("span", name, class_="bar-name"),
        chart,
        el("span", units.size(total), class_="bar-total"),
        class_="bar",
    )


def _numbers(parts: tuple[SizePart, ...]) -> Html:
    columns = [Column("Part"), Column("Before", True), Column("After", True), Column("Change")]
    rows = [_row(place, part) for place, part in enumerate(parts)]
    return table("Bytes before and after, by part", columns, rows)


def _row(place: int, part: SizePart) -> list[Cell]:
    name = el("span", el("i", class_=f"swatch {_colour(place)}"), part.name)
    before, after = part.bytes_before, part.bytes_after
    if before and after:
        change = units.smaller(before, after)
    else:
        change = "new" if after else "gone" if before else units.MISSING
    return [
        Cell(name),
        number(before or None, units.size(before)),
        number(after or None, units.size(after)),
        Cell(change),
    ]


def _colour(place: int) -> str:
    return f"c{place % 8}"
