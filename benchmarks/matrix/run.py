"""The matrix of formats: every kind of result, in every format, in that format's own loader.

    python -m benchmarks.matrix.run [--only transformers gptqmodel vLLM]

runs the tests that open them (tests/interop/test_matrix.py, tests/peers/test_matrix_*.py), stores
what they recorded as benchmarks/results/formats_matrix.json and writes the tables of
docs/formats.md. Needs the environments of vLLM and gptqmodel (benchmarks/peers/README.md) and the
extras dev and interop in its own; 10 minutes on 2 cores. Nothing is stored when a test fails or
when a cell is missing. --only: the cells of the other loaders stay as they are stored.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import recorded
from benchmarks.matrix import table
from benchmarks.matrix.rows import GPTQMODEL, LOADERS, ROWS, TRANSFORMERS, VLLM
from benchmarks.processes import setting

TESTS: Mapping[str, str] = {
    TRANSFORMERS: "tests/interop/test_matrix.py",
    GPTQMODEL: "tests/peers/test_matrix_gptqmodel.py",
    VLLM: "tests/peers/test_matrix_vllm.py",
}

Cell = dict[str, Any]


def whole(cells: Iterable[Cell]) -> list[Cell]:
    """The cells in the order of the tables, a refusal or one cell a loader for each row and
    format; ValueError where some are missing."""
    found = {(c["method"], c["format"], c.get("loader")): c for c in cells}
    ordered, missing = [], []
    for row in ROWS:
        for fmt, loaders in LOADERS.items():
            refusal = found.get((row.name, fmt, None), {})
            if refusal.get("outcome") == "refused":
                ordered.append(refusal)
                continue
            keys = [(row.name, fmt, loader) for loader in loaders]
            ordered += [found[key] for key in keys if key in found]
            missing += [" / ".join(key) for key in keys if key not in found]
    if missing:
        raise ValueError(f"{len(missing)} cells were not tried, first {missing[0]}")
    return ordered


def measure(loaders: Sequence[str]) -> tuple[list[Cell], dict[str, Any]]:
    """Cells, and versions by loader; SystemExit where a part was skipped."""
    remake = {"MATRIX_REMAKE": "1"}  # the stored table is what they replace
    found = recorded.measure((TESTS[name] for name in loaders), ("cell", "versions"), remake)
    versions = dict(pair for part in found["versions"] for pair in part.items())
    if skipped := [name for name in loaders if name not in versions]:
        sys.exit(f"the tests of {', '.join(skipped)} were skipped, so nothing is stored")
    return found["cell"], versions


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=TESTS, default=list(TESTS), metavar="LOADER")
    loaders = parser.parse_args().only
    before = table.stored() if len(loaders) < len(TESTS) else {"cells": [], "made": {}}
    cells, versions = measure(loaders)
    # Refusals, which no loader sees, are recorded with transformers' cells.
    anew = {*loaders, *([None] if TRANSFORMERS in loaders else [])}
    kept = [cell for cell in before["cells"] if cell.get("loader") not in anew]
    made = {
        name: {**setting("benchmarks.matrix.run"), "versions": versions[name]} for name in loaders
    }
    result = {"made": {**before["made"], **made}, "cells": whole([*kept, *cells])}
    table.RESULT.write_text(json.dumps(result, indent=1) + "\n")
    table.main()


if __name__ == "__main__":
    main()
