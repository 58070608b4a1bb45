"""The stored matrix of exports as the tables of docs/export.md.

    python -m benchmarks.export.matrix_table

writes what lies between the two markers anew from benchmarks/results/export_matrix.json.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.export.matrix_rows import FAMILIES, RESULTS, ROWS, TARGETS, VARIANTS
from benchmarks.matrix.table import number, written
from benchmarks.processes import REPO
from benchmarks.processes import RESULTS as FOLDER

RESULT = FOLDER / "export_matrix.json"
DOCUMENT = REPO / "docs" / "export.md"
MARKS = "<!-- matrix: python -m benchmarks.export.matrix -->", "<!-- end of matrix -->"
TITLES: Mapping[str, str] = {
    RESULTS: "Results of every method, of the demo model:",
    FAMILIES: "Families, random models of two layers:",
}

REFUSED = "refused"
# Notes of what is not as in the checkpoint.
CHANGED = re.compile("weights become F|stay as they are|not rounded as|below 0|left out")

Cell = Mapping[str, Any]
Notes = dict[str, int]  # text -> its number below the tables


def stored() -> dict[str, Any]:
    return dict(json.loads(RESULT.read_text()))


def section(result: Mapping[str, Any]) -> str:
    """Both tables and their notes, in markdown."""
    cells = {(c["block"], c["row"], c["target"], c["variant"]): c for c in result["cells"]}
    notes: Notes = {}
    parts = []
    for block, title in TITLES.items():
        parts += [title, "\n".join(_table(cells, block, notes))]
    parts += ["\n".join(f"{n}. {text}" for text, n in notes.items()), _made(result["made"])]
    return "\n\n".join(parts)


def _table(cells: Mapping[Any, Cell], block: str, notes: Notes) -> Iterator[str]:
    variants = list(VARIANTS[block])
    yield "| | " + " | ".join(f"`{target}`" for target in TARGETS) + " |"
    yield "|---" * (len(TARGETS) + 1) + "|"
    yield "| *in* |" + f" {', '.join(variants)} |" * len(TARGETS)
    for row in ROWS:
        if row.block == block:
            found = ([cells[block, row.name, t, v] for v in variants] for t in TARGETS)
            yield f"| {row.name} | " + " | ".join(texts(some, notes) for some in found) + " |"


def texts(cells: list[Cell], notes: Notes) -> str:
    """Cells of one target, and the numbers of their notes; what holds for all of them once."""
    bodies = [_body(cell) for cell in cells]
    marks = ["".join(f" [{_note(notes, x)}]" for x in _reasons(cell)) for cell in cells]
    if len(set(marks)) > 1:
        return ", ".join(body + mark for body, mark in zip(bodies, marks, strict=True))
    return (REFUSED if set(bodies) == {REFUSED} else ", ".join(bodies)) + marks[0]


def _body(cell: Cell) -> str:
    if cell["outcome"] == REFUSED:
        return REFUSED
    level = "" if cell["level"] == "tokens" else f"{cell['level']} "
    return level + number(share(cell))


def _reasons(cell: Cell) -> Iterator[str]:
    """Why it was refused, or reached less, or needed an option, and what is not as in the
    checkpoint; without what differs from cell to cell."""
    if cell["outcome"] == REFUSED:
        yield re.sub(r"^model\.\S+ (\([^)]*\) )?(is .*?, and )?", "", cell["reason"])
        return
    if cell["level"] != "tokens":
        yield re.sub(r":? ?(logits|log-probabilities)? within [^ ,]+", "", _other_tokens(cell))
    if "option" in cell:
        why = re.sub(r" by [\d.]+%", "", cell["without"])
        why = re.sub(r"\d+ of \d+ scales", "scales", why)
        yield f"with `{cell['option']}`; without it: {why}"
    for note in filter(CHANGED.search, cell["notes"]):
        text = re.sub(r"^\d+ | \(a[^)]*\)|: blk\..*", "", note)
        yield re.sub(r"become F\d+", "become dense", text)


def _other_tokens(cell: Cell) -> str:
    """The line of the proof that says so."""
    lines = (line for line in cell["detail"] if "greedy tokens" in line)
    return next(line for line in lines if not line.endswith("greedy tokens are the same"))


def share(cell: Cell) -> float:
    """The largest difference of a logit by the largest logit, or by 1 where that is less."""
    return float(cell["error"]) / max(1.0, float(cell["largest_logit"]))


def _note(notes: Notes, text: str) -> int:
    return notes.setdefault(text, len(notes) + 1)


def _made(made: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    return f"Made by `{made['command']}` on {made['date'].split()[0]} ({versions})."


def main() -> None:
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(written(text, section(stored()), MARKS))


if __name__ == "__main__":
    main()
