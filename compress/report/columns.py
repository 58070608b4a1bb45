"""Rows of words as aligned columns of plain text, and lines that fit a terminal."""

import re
from collections.abc import Sequence
from itertools import zip_longest

from compress.report.terminal.cells import COLUMNS, pad, width, wrap

_GAP = "  "
_LEAST = 8  # cells of a column that is made narrower
_LABEL = re.compile(r"\s*\S+(?: \S+)*?  +")
# Below these lines stand blocks to copy, indented, up to the next line that is not.
_COPIED = re.compile(r"Open it|Start [\w-]+|It is in|Make it again")


def aligned(table: Sequence[Sequence[str]], cells: int | None = COLUMNS) -> list[str]:
    """Lines with columns as wide as their longest cell, two spaces between; no space at the end.

    Where they would take more than `cells`, the widest columns that have several words are made
    narrower and their cells go over several lines. No word is broken. None: a row is a line.
    """
    widths = [max(width(row[i]) for row in table) for i in range(len(table[0]))]
    least = [
        max(_LEAST, *(width(word) for row in table for word in row[i].split(" ")))
        for i in range(len(widths))
    ]
    taken = sum(widths) + len(_GAP) * (len(widths) - 1)
    excess = 0 if cells is None else taken - cells
    for i in sorted(range(len(widths)), key=lambda i: -widths[i]):
        less = min(max(excess, 0), max(widths[i] - least[i], 0))
        widths[i], excess = widths[i] - less, excess - less
    return [line for row in table for line in _lines(row, widths)]


def _lines(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    wrapped = [wrap(cell, w, whole=True) for cell, w in zip(row, widths, strict=True)]
    return [
        _GAP.join(pad(cell, w) for cell, w in zip(parts, widths, strict=True)).rstrip()
        for parts in zip_longest(*wrapped, fillvalue="")
    ]


def fitted(text: str, cells: int) -> str:
    """Text whose lines are wrapped at words where they take more than `cells`; what goes on stands
    below the words behind a line's label. Lines to copy stay as they are, and so do long words: a
    terminal breaks them without a newline."""
    lines, copied = [], False
    for line in text.split("\n"):
        inside = copied and (line == "" or line.startswith("  "))
        copied = inside or _COPIED.fullmatch(line) is not None
        lines += [line] if copied or width(line) <= cells else _folded(line, cells)
    return "\n".join(lines)


def _folded(line: str, cells: int) -> list[str]:
    found = _LABEL.match(line)
    label = line[: len(line) - len(line.lstrip(" "))]
    hang = len(label) + 2
    if found is not None and width(found[0]) <= cells // 2:
        label, hang = found[0], width(found[0])
    body = line[len(label) :].rstrip(" ")
    first = wrap(body, cells - width(label), whole=True)[0]
    rest = body[len(first) :].strip(" ")
    return [label + first, *(" " * hang + x for x in wrap(rest, cells - hang, whole=True) if x)]
