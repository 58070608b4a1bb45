"""Whether TensorRT builds engines of our graphs: of every kind of result and every family.

    python -m benchmarks.export.engines [--only TEXT ...]

exports the rows of the matrix of exports (matrix_rows.py) to TensorRT, has each graph parsed and
built, stores what came of it as benchmarks/results/export_engines.json and writes the table of
docs/export.md. Needs the extras dev and interop; TensorRT for RTX does it without a GPU. Nothing is
stored where a graph that was exported is not built. --only: rows whose names have one of the texts;
the others stay as they are stored.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.export.matrix_rows import ROWS, VARIANTS
from benchmarks.matrix.table import written
from benchmarks.processes import REPO, RESULTS, package_versions, setting

RESULT, DOCUMENT = RESULTS / "export_engines.json", REPO / "docs" / "export.md"
MARKS = "<!-- engines: python -m benchmarks.export.engines -->", "<!-- end of engines -->"
PACKAGES = ("torch", "transformers", "onnx", "onnx-ir")

Cell = dict[str, Any]


def stored() -> dict[str, Any]:
    return dict(json.loads(RESULT.read_text()))


def measured(only: Sequence[str]) -> dict[str, Any]:
    """By a process of its own, which has tests/ on its path."""
    paths = os.pathsep.join([str(REPO), str(REPO / "tests"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="compress-model-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.export.engines_cells", folder, *only],
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(result: dict[str, Any]) -> str:
    """Markdown, a line for every block and variant."""
    rows = ["| Graphs | Exported | Built | CPU seconds, median (most) |", "|---|---|---|---|"]
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in result["cells"]:
        groups.setdefault((cell["block"], cell["variant"]), []).append(cell)
    rows += [_row(*name, cells) for name, cells in groups.items()]
    where = f"with {result['device']}" if result["device"] else "without a GPU"
    return "\n".join([f"By {result['builder']}, {where}:", "", *rows])


def _row(block: str, variant: str, cells: Sequence[Cell]) -> str:
    built = [cell["cpu_s"] for cell in cells if cell["outcome"] == "built"]
    exported = sum(cell["outcome"] != "refused" for cell in cells)
    spent = f"{statistics.median(built):.1f} ({max(built):.1f})"
    what = {"results": "results of methods, tale-6m", "families": "families, random"}[block]
    return f"| {what}, {variant} | {exported} of {len(cells)} | {len(built)} | {spent} |"


def not_built(cells: Iterable[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell["outcome"] == "not built"]


def together(kept: Iterable[Cell], anew: Sequence[Cell]) -> list[Cell]:
    """Cells in the order of the matrix, those that were tried anew in place of older ones."""
    found = {(c["block"], c["row"], c["variant"]): c for c in (*kept, *anew)}
    return [found[row.block, row.name, x] for row in ROWS for x in VARIANTS[row.block]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT")
    only = parser.parse_args().only
    found = measured(only)
    bad = not_built(found["cells"])
    if bad:
        print(json.dumps(bad, indent=1), file=sys.stderr)
        sys.exit(f"{len(bad)} graphs were exported and not built, so nothing is stored")
    versions = package_versions(sys.executable, PACKAGES)
    made = {**setting("benchmarks.export.engines"), "versions": versions}
    result = {"made": made, **found}
    if only:
        result = stored()
        result["again"] = [*result.get("again", ()), made]
        result["cells"] = together(result["cells"], found["cells"])
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    DOCUMENT.write_text(written(DOCUMENT.read_text(), table(result), MARKS))


if __name__ == "__main__":
    main()
