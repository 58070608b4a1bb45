"""The matrix of exports: every kind of result and every family, to every target, proved.

    python -m benchmarks.export.matrix [--only TEXT ...]

makes and exports each row in a process of its own (matrix_row.py), stores what came of it as
benchmarks/results/export_matrix.json and writes the tables of docs/export.md. Needs the extras dev
and interop; half an hour on one core. Nothing is stored where an export crashed or was
wrong. --only: rows whose names have one of the texts; the others stay as they are stored.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

from benchmarks.export import matrix_table
from benchmarks.export.matrix_rows import ROWS, TARGETS, VARIANTS, Row
from benchmarks.processes import REPO, package_versions, setting

PACKAGES = (
    *("torch", "transformers", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-genai"),
    *("gguf", "xllamacpp", "openvino"),
)
# Of cells that may be stored.
GOOD = ("yes", "refused")

Cell = dict[str, Any]


def cells_of(row: Row) -> list[Cell]:
    """Of one row, by a process of its own."""
    paths = os.pathsep.join([str(REPO), str(REPO / "tests"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="compress-model-") as folder:
        command = [sys.executable, "-m", "benchmarks.export.matrix_row", row.block, row.name]
        done = subprocess.run(
            [*command, folder],
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return list(json.loads(done.stdout.splitlines()[-1]))


def whole(cells: Iterable[Cell]) -> list[Cell]:
    """The cells in the order of the tables; ValueError where one is missing."""
    found = {(c["block"], c["row"], c["target"], c["variant"]): c for c in cells}
    keys = [
        (row.block, row.name, target, variant)
        for row in ROWS
        for target in TARGETS
        for variant in VARIANTS[row.block]
    ]
    missing = [" / ".join(key) for key in keys if key not in found]
    if missing:
        raise ValueError(f"{len(missing)} cells were not tried, first {missing[0]}")
    return [found[key] for key in keys]


def measure(rows: Iterable[Row]) -> list[Cell]:
    """Cells of some rows; SystemExit where one crashed or was wrong."""
    cells: list[Cell] = []
    for row in rows:
        print(f"{row.block}: {row.name}", file=sys.stderr)
        cells += cells_of(row)
    bad = [cell for cell in cells if cell["outcome"] not in GOOD]
    for cell in bad:
        print(json.dumps(cell, indent=1), file=sys.stderr)
    if bad:
        sys.exit(f"{len(bad)} exports crashed or were wrong, so nothing is stored")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT")
    only = parser.parse_args().only
    rows = [x for x in ROWS if not only or any(part in x.name for part in only)]
    cells, versions = measure(rows), package_versions(sys.executable, PACKAGES)
    made = {**setting("benchmarks.export.matrix"), "versions": versions}
    result: dict[str, Any] = {"made": made, "cells": cells}
    if only:
        result = matrix_table.stored()
        anew = {(row.block, row.name) for row in rows}
        kept = (cell for cell in result["cells"] if (cell["block"], cell["row"]) not in anew)
        result = {**result, "again": [*result.get("again", ()), made], "cells": [*kept, *cells]}
    result["cells"] = whole(result["cells"])
    matrix_table.RESULT.write_text(json.dumps(result, indent=1) + "\n")
    matrix_table.main()


if __name__ == "__main__":
    main()
