"""The table of layers: what was done to each, and why some were skipped or kept simpler."""

import math

from compress.report import units
from compress.report.markup import Html, Node, el
from compress.report.parts import Cell, Column, number, section, table
from compress.report.schema import Layer, Report

# Above this many rows the experts of a block share one; the page would take seconds to open.
MANY_LAYERS = 2000
_REASONS = 8
_ERROR = 6  # place of the error among the columns

_COLUMNS = [
    Column("Layer"),
    Column("Method"),
    Column("Scheme"),
    Column("Bits", True, "bits per weight, scales included"),
    Column("Before", True),
    Column("After", True),
    Column("Error", True, "share of the layer's output energy that changed"),
    Column("Tokens", True, "calibration tokens that reached the layer"),
    Column("Damping", True, "share of the Hessian's mean diagonal that was added to it"),
    Column("Note"),
]
_PLAIN = Column("Plainly rounded", True, "error of rounding to nearest, same scheme, same data")
_OUTLIERS = Column("Outliers", True, "input columns that calibration keeps in 16 bit")


def layers(report: Report) -> Html | None:
    """The section; None when the report lists no layers."""
    every = [(stage.name, layer) for stage in report.stages for layer in stage.layers]
    if not every:
        return None
    several = len({stage for stage, _ in every}) > 1
    groups = [[pair] for pair in every]
    note = _count(report.layers)
    if len(every) > MANY_LAYERS:
        groups = _by_block(every)
        note += " The experts of a block share a row; report.json has each of them."
    plain = any(layer.plain_error is not None for layer in report.layers)
    outliers = any(layer.outlier_columns is not None for layer in report.layers)
    columns = list(_COLUMNS)
    if plain:
        columns.insert(_ERROR + 1, _PLAIN)
    if outliers:
        columns.insert(-1, _OUTLIERS)
    columns = [Column("Stage"), *columns] if several else columns
    rows = []
    for group in groups:
        row = _row([layer for _, layer in group])
        if plain:
            row.insert(_ERROR + 1, number(_mean([layer.plain_error for _, layer in group])))
        if outliers:
            row.insert(-1, _range([layer.outlier_columns for _, layer in group]))
        rows.append([Cell(group[0][0]), *row] if several else row)
    grid = table("Layers", columns, rows, kind="sortable tall")
    return section("layers", "Layers", _exceptions(report.layers), grid, note=note)


def _exceptions(every: tuple[Layer, ...]) -> Html | None:
    """What did not go as asked, by reason, so that nobody has to search the table for it."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for layer in every:
        if layer.skipped_reason is not None:
            reasons.setdefault(("skipped", layer.skipped_reason), []).append(layer.name)
        elif layer.kept_reason is not None:
            key = (f"kept {layer.method}", layer.kept_reason)
            reasons.setdefault(key, []).append(layer.name)
    lines = [_exception(*key, names) for key, names in list(reasons.items())[:_REASONS]]
    if len(reasons) > _REASONS:
        more = sum(len(names) for names in list(reasons.values())[_REASONS:])
        lines.append(el("li", f"{units.whole(more)} more: see the notes in the table"))
    return el("ul", *lines, class_="exceptions") if lines else None


def _exception(fate: str, reason: str, names: list[str]) -> Html:
    shown = names[0] if len(names) == 1 else f"{names[0]} and {units.whole(len(names) - 1)} more"
    kind = "skipped" if fate == "skipped" else "kept"
    return el("li", el("b", fate), " ", el("code", shown), f": {reason}", class_=kind)


def _count(every: tuple[Layer, ...]) -> str:
    skipped = sum(1 for layer in every if layer.skipped_reason is not None)
    kept = sum(1 for layer in every if layer.kept_reason is not None)
    parts = [f"{units.whole(len(every) - skipped)} compressed"]
    if kept:
        parts.append(f"{units.whole(kept)} of them with a simpler method than asked for")
    parts.append(f"{units.whole(skipped)} skipped" if skipped else "none skipped")
    return ", ".join(parts) + "."


def _by_block(every: list[tuple[str, Layer]]) -> list[list[tuple[str, Layer]]]:
    """Experts of the same stage, block, role and fate together; other layers alone."""
    groups: dict[tuple[object, ...], list[tuple[str, Layer]]] = {}
    for stage, layer in every:
        fate = (layer.method, layer.scheme, layer.skipped_reason, layer.kept_reason)
        alone = layer.expert is None or layer.block is None
        key = (stage, layer.name) if alone else (stage, layer.block, layer.role, *fate)
        groups.setdefault(key, []).append((stage, layer))
    return list(groups.values())


def _row(group: list[Layer]) -> list[Cell]:
    first = group[0]
    before, after = sum(x.bytes_before for x in group), sum(x.bytes_after for x in group)
    note, kind = _note(group)
    damping = _mean([x.damping for x in group])
    bits = sum(x.bits_per_weight for x in group) / len(group)
    return [
        Cell(_name(group), class_=kind),
        Cell(first.method or units.MISSING),
        Cell(first.scheme or units.MISSING),
        number(bits, units.trimmed(bits)),
        number(before, units.size(before)),
        number(after, units.size(after)),
        number(_mean([x.error for x in group])),
        _range([layer.tokens for layer in group]),
        number(damping, None if damping is None else units.trimmed(damping)),
        Cell(note, class_=kind),
    ]


def _name(group: list[Layer]) -> Node:
    first = group[0]
    if len(group) == 1:
        return el("code", first.name)
    return f"block {first.block}, {first.role}: {len(group)} experts"


def _mean(values: list[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return math.fsum(found) / len(found) if found else None


def _range(values: list[int | None]) -> Cell:
    """A number, or the least and largest of a group's, sorted by the least."""
    found = [value for value in values if value is not None]
    if not found:
        return number(None)
    low, high = min(found), max(found)
    shown = units.whole(low) if low == high else f"{units.whole(low)} to {units.whole(high)}"
    return number(low, shown)


def _note(group: list[Layer]) -> tuple[Node, str | None]:
    layer = group[0]
    if layer.skipped_reason is not None:
        return el("span", el("b", "skipped"), f" {layer.skipped_reason}"), "skipped"
    if layer.kept_reason is not None:
        return el("span", el("b", f"kept {layer.method}"), f" {layer.kept_reason}"), "kept"
    dead = [x.dead_columns for x in group if x.dead_columns]
    if dead:
        low, high = min(dead), max(dead)
        shown = units.whole(low) if low == high else f"{units.whole(low)} to {units.whole(high)}"
        noun = "column" if high == 1 else "columns"
        return f"{shown} input {noun} never driven by calibration", None
    return "; ".join(layer.folds) or None, None
