"""Pieces that the sections of the page share: sections, tables, lists of facts."""

from dataclasses import dataclass
from typing import Any

from compress.report import units
from compress.report.markup import Html, Node, el, join

NARROW = 4  # columns that a phone shows side by side
LONG = 30  # rows of a table that is printed
_BESIDE = 8  # columns of plain data, of long names, that a screen shows side by side


@dataclass(frozen=True, slots=True)
class Cell:
    """A table cell. sort: the number that the column sorts by, when the text is not enough."""

    node: Node
    sort: float | None = None
    class_: str | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A column's title; numbers are right-aligned. hint: the title's hover text. alone: the title
    where cells stand below each other, each beside its own."""

    title: str
    numeric: bool = False
    hint: str | None = None
    alone: str | None = None


def section(anchor: str, title: str, *body: Node, note: Node = None) -> Html:
    """A titled part of the page; `note` is the line below its title."""
    under = None if note is None else el("p", note, class_="note")
    return el("section", el("h2", title), under, *body, id=anchor)


def table(label: str, columns: list[Column], rows: list[list[Cell]], kind: str = "") -> Html:
    """A table that scrolls sideways by itself; kind "sortable" gets sort buttons by script.

    On a phone the cells of a wide one stand below each other ("stack"), so that all are seen. One
    with more rows than LONG is not printed.
    """
    if "sortable" not in kind and len(columns) > NARROW:
        kind = f"{kind} stack"
    long = len(rows) > LONG
    head = el("tr", join([_heading(column) for column in columns]))
    body = [_row(columns, cells) for cells in rows]
    grid = el("table", el("thead", head), el("tbody", join(body)), class_=kind.strip() or None)
    kinds = ["scroll", *kind.split(), *(["narrow"] if len(columns) <= NARROW else [])]
    kinds += ["long"] if long else []
    found = el("div", grid, class_=" ".join(kinds), role="region", aria_label=label, tabindex=0)
    if not long:
        return found
    left = f"{units.counted(len(rows), 'row')} of this table are on the screen's page alone."
    return join([found, el("p", left, class_="note printed")])


def _heading(column: Column) -> Html:
    kind = "num" if column.numeric else None
    return el("th", column.title, scope="col", class_=kind, title=column.hint)


def _row(columns: list[Column], cells: list[Cell]) -> Html:
    assert len(columns) == len(cells)
    shown = []
    for place, (column, cell) in enumerate(zip(columns, cells, strict=True)):
        kind = " ".join(filter(None, ["num" if column.numeric else None, cell.class_]))
        tag, scope = ("th", "row") if place == 0 else ("td", None)
        title = (column.alone or column.title) if place else None
        shown.append(
            el(
                tag,
                cell.node,
                scope=scope,
                class_=kind or None,
                data_sort=cell.sort,
                data_title=title,
            )
        )
    return el("tr", join(shown))


def number(value: float | None, shown: str | None = None, class_: str | None = None) -> Cell:
    """A numeric cell: a dash for None, else `shown` or three significant digits."""
    if value is None:
        return Cell(units.MISSING, class_="missing")
    return Cell(units.significant(value) if shown is None else shown, value, class_)


def facts(pairs: list[tuple[str, Node]]) -> Html:
    """Names and values, one below the other."""
    return el("dl", join([el("div", el("dt", name), el("dd", value)) for name, value in pairs]))


def facts_of(free: dict[str, Any]) -> Html:
    """A free JSON object as facts, nested objects indented."""
    return facts([(_words(key), _value(key, value)) for key, value in free.items()])


def _words(key: str) -> str:
    return key.replace("_", " ")


def _value(key: str, value: Any) -> Node:
    if isinstance(value, dict):
        return facts_of(_of_unit(key, value)) if value else units.MISSING
    if isinstance(value, list | tuple):
        if not value:
            return units.MISSING
        if _alike(value):
            return _table_of(key, value)
        if any(isinstance(item, dict | list | tuple) for item in value):
            return el("ol", join([el("li", _value(key, item)) for item in value]))
        return ", ".join(scalar(key, item) for item in value)
    shown = scalar(key, value)
    return el("code", shown) if _is_code(key, value) else shown


def _of_unit(key: str, free: dict[str, Any]) -> dict[str, Any]:
    """Plain numbers of bytes by name as sizes: what they are of stands in the key above."""
    if "bytes" not in key.split("_"):
        return free
    return {k: units.size(v) if isinstance(v, int) else v for k, v in free.items()}


def _alike(items: list[Any] | tuple[Any, ...]) -> bool:
    """Whether items are flat objects of the same keys: rows of a table."""
    if len(items) < 2 or not all(isinstance(item, dict) and item for item in items):
        return False
    flat = [_flat(item) for item in items]
    scalars = all(not isinstance(x, dict | list | tuple) for row in flat for x in row.values())
    return scalars and all(list(row) == list(flat[0]) for row in flat)


def _flat(item: dict[str, Any]) -> dict[str, Any]:
    """Objects inside become columns of their own: "first token ms, measured"."""
    found: dict[str, Any] = {}
    for key, value in item.items():
        if isinstance(value, dict):
            found |= {f"{key}, {inner}": x for inner, x in value.items()}
        else:
            found[key] = value
    return found


def _table_of(key: str, items: list[Any] | tuple[Any, ...]) -> Html:
    """Rows, or columns where they would be more than go side by side."""
    rows = [_flat(item) for item in items]
    first, *others = rows[0]
    if len(others) < _BESIDE:
        columns = [Column(_words(name), numeric=True) for name in rows[0]]
        cells = [[Cell(scalar(k, x)) for k, x in row.items()] for row in rows]
        return table(_words(key), columns, cells)
    columns = [Column(_words(first)), *(Column(scalar(first, r[first]), True) for r in rows)]
    cells = [[Cell(_words(k)), *(Cell(scalar(k, r[k])) for r in rows)] for k in others]
    return table(_words(key), columns, cells)


def _is_code(key: str, value: Any) -> bool:
    return isinstance(value, str) and (key == "path" or "sha256" in key or "hash" in key)


def scalar(key: str, value: Any) -> str:
    """A JSON scalar for people; the key's last word tells bytes and seconds from plain numbers."""
    if value is None:
        return units.MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        key = key.partition(",")[0]  # of an object inside: "cache_bytes, measured"
        unit = key.rpartition("_")[2]
        if unit == "bytes" or "_bytes_per_" in key:
            return units.size(value)
        if unit == "seconds":
            return units.duration(value)
        if unit == "seed":
            return str(value)
        return units.whole(value) if isinstance(value, int) else units.trimmed(value, 4)
    return str(value)
