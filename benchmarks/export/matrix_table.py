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
            yield f"| {row.name} | " + " | ".join(_texts(some, notes) for some in found) + " |"


def _texts(cells: list[Cell], notes: Notes) -> str:
    """One for all variants of a target where none is taken, and for the same reason."""
    texts = [text(cell, notes) for cell in cells]
    return texts[0] if len(set(texts)) == 1 and "refused" in texts[0] else ", ".join(texts)


def text(cell: Cell, notes: Notes) -> str:
    """A cell, with the numbers of its notes."""
    if cell["outcome"] == "refused":
        return f"refused [{_note(notes, cell['reason'])}]"
    parts = [number(share(cell))]
    if cell["level"] != "tokens":
        parts = [cell["level"], *parts, f"[{_note(notes, _less(cell))}]"]
    if "option" in cell:
        parts.append(f"[{_note(notes, _lifted(cell))}]")
    return " ".join(parts)


def share(cell: Cell) -> float:
    """The largest difference of a logit by the largest logit, or by 1 where that is less."""
    return float(cell["error"]) / max(1.0, float(cell["largest_logit"]))


def _less(cell: Cell) -> str:
    """Why the level is not the highest."""
    return re.sub(r":? ?(logits|log-probabilities)? within [^ ,]+", "", cell["detail"][-1])


def _lifted(cell: Cell) -> str:
    """The option of a cell, and why; without what differs from cell to cell."""
    why = re.sub(r" by [\d.]+%", "", cell["without"])
    return f"with `{cell['option']}`; without it: {why}"


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
