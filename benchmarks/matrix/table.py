"""The stored matrix as the tables of docs/formats.md.

    python -m benchmarks.matrix.table

writes what lies between the two markers anew from benchmarks/results/formats_matrix.json.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.matrix.rows import LOADERS, ROWS, VLLM
from benchmarks.processes import REPO, RESULTS

RESULT = RESULTS / "formats_matrix.json"
DOCUMENT = REPO / "docs" / "formats.md"
MARKS = "<!-- matrix: python -m benchmarks.matrix.run -->", "<!-- end of matrix -->"
REASON_LENGTH = 170

Cell = Mapping[str, Any]
Notes = dict[str, int]  # text -> its number below the tables


def stored() -> dict[str, Any]:
    return dict(json.loads(RESULT.read_text()))


def stored_cells() -> list[Cell]:
    return list(stored()["cells"])


def section(result: Mapping[str, Any]) -> str:
    """Both tables and their notes, in markdown."""
    cells = {(c["method"], c["format"], c.get("loader")): c for c in result["cells"]}
    notes: Notes = {}
    first = [(fmt, loaders[0]) for fmt, loaders in LOADERS.items()]
    second = [(fmt, VLLM) for fmt, loaders in LOADERS.items() if VLLM in loaders[1:]]
    parts = [
        "\n".join(_table(cells, first, notes)),
        "The same checkpoints in vLLM on CPU, in fp16 unless a note says otherwise:",
        "\n".join(_table(cells, second, notes)),
        "\n".join(f"{n}. {text}" for text, n in notes.items()),
        _made(result),
    ]
    return "\n\n".join(parts)


def _table(
    cells: Mapping[Any, Cell], columns: list[tuple[str, str]], notes: Notes
) -> Iterator[str]:
    yield "| | " + " | ".join(f"`{fmt}`" for fmt, _ in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    yield "| *opened by* | " + " | ".join(loader for _, loader in columns) + " |"
    yield "| *bound* | " + " | ".join(_bounds(cells, column) for column in columns) + " |"
    for row in ROWS:
        texts = [_text(_find(cells, row.name, *column), notes) for column in columns]
        yield f"| {row.name} | " + " | ".join(texts) + " |"


def _find(cells: Mapping[Any, Cell], method: str, fmt: str, loader: str) -> Cell:
    """The loader's cell, or the refusal that no loader sees."""
    return cells.get((method, fmt, loader)) or cells[method, fmt, None]


def _bounds(cells: Mapping[Any, Cell], column: tuple[str, str]) -> str:
    found = {c["bound"] for (_, *where), c in cells.items() if (*where,) == column and "bound" in c}
    return ", ".join(number(bound) for bound in sorted(found)) or "–"


def _text(cell: Cell, notes: Notes) -> str:
    if cell["outcome"] in ("refused", "not loaded"):
        return f"{cell['outcome']} [{_note(notes, short(cell['reason'], cell['format']))}]"
    equal, of = cell["tokens"]
    marks = "".join(f" [{_note(notes, text)}]" for text in cell.get("notes", ()))
    return f"{cell['outcome']}, {number(cell['logits'])}, {equal}/{of}{marks}"


def _note(notes: Notes, text: str) -> int:
    return notes.setdefault(text, len(notes) + 1)


def short(reason: str, fmt: str) -> str:
    """A reason without the layer it was found at, its scheme, and the formats that take it, which
    are cells of their own; a loader's error without what pydantic puts around it."""
    text = re.sub(r"^\S+ does not fit into \S+( \(nor do(?:es)? \d+ more layers?\))?: ", "", reason)
    text = re.sub(r"; formats that take all of .*", "", text)
    text = re.sub(r"(it holds [^;]*?), not [^;]*", r"\1", text)
    text = re.sub(r" \((a|int)-?(8|fp8)? [^)]*\)", "", text)
    text = text.replace(f"{fmt} has no place", "it has no place")
    text = re.sub(r"^\S*(ValidationError: ).*?Value error, ", r"\1", text)
    text = re.sub(r" \[type=value_error.*", "", text)
    return text if len(text) <= REASON_LENGTH else text[:REASON_LENGTH].rsplit(" ", 1)[0] + " ..."


def number(value: float) -> str:
    """0, 0.03 or 4e-6."""
    if value == 0 or value >= 1e-3:
        return f"{value:.2g}"
    return re.sub(r"e-0*", "e-", f"{value:.0e}")


def _made(result: Mapping[str, Any]) -> str:
    loaders = "; ".join(
        f"{loader} on {found['date'].split()[0]} ("
        + ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        + ")"
        for loader, found in result["made"].items()
    )
    return f"Made by `python -m benchmarks.matrix.run`: {loaders}."


def row(*cells: object) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def written(document: str, section: str, marks: tuple[str, str] = MARKS) -> str:
    """The document with the section between its markers; ValueError where it has none."""
    head, begin, rest = document.partition(marks[0])
    _, end, tail = rest.partition(marks[1])
    if not (begin and end):
        raise ValueError(f"{DOCUMENT} has no place for the table: {' and '.join(marks)} mark it")
    return f"{head}{begin}\n\n{section}\n\n{end}{tail}"


def main() -> None:
    DOCUMENT.write_text(written(DOCUMENT.read_text(), section(stored())))


if __name__ == "__main__":
    main()
