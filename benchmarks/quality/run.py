"""Quality of every method on small real models, ours and other tools' side by side.

    python -m benchmarks.quality.run [--tools ours peers] [--models ...] [--rows int4/gptq w8a8 ...]
        [--seeds 5] [--work FOLDER] [--again] [--quiet 0.1]
    python -m benchmarks.quality.table

Each seed draws other rows of real text; all tools get the same ones. All results are measured by
our evaluation against the source. Results are stored cell by cell (a row on a model by one tool)
and not made again; checkpoints stay in the work folder, so that a stopped run goes on.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.processes import REPO, setting
from benchmarks.quality import results
from benchmarks.quality.rows import MODELS, OURS, ROWS, Cell, Model, Row, our_cell, peer_cell
from benchmarks.quality.tools import Made, make, measure, versions


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """What was asked for, model by model, in the order of the table."""
    models = [model for model in MODELS if model.name in options.models]
    for model in models:
        for row in ROWS:
            if row.is_for(model) and wanted(row, options.rows):
                yield from tools_of(model, row, options)


def tools_of(model: Model, row: Row, options: argparse.Namespace) -> Iterator[Cell]:
    if "ours" in options.tools:
        yield our_cell(model, row, options.seeds)
    if "peers" in options.tools and (peer := peer_cell(model, row, options.seeds)):
        yield peer


def wanted(row: Row, patterns: list[str]) -> bool:
    """Whether a row is named: "int4" is a group, "int4/gptq" a row; no names are all."""
    return not patterns or row.group in patterns or f"{row.group}/{row.name}" in patterns


def lacking(cell: Cell) -> list[str]:
    """Methods that the tool does not have."""
    from compress.methods import METHODS

    return [m for m in cell.row.methods if cell.tool == OURS and m not in METHODS]


def work_on(cell: Cell, work: Path, quiet: float | None = None) -> None:
    """Make, measure and store one cell. What another tool cannot make is stored as its failure;
    what goes wrong on our side is said and leaves the cell open."""
    if missing := lacking(cell):
        tell(f"{cell.label}: missing: no method {', '.join(missing)}")
        return
    try:
        made = [make(cell, seed, work, quiet) for seed in range(cell.seeds)]
    except RuntimeError as error:
        tell(f"{cell.label}: FAILED: {str(error).strip()[-1500:]}")
        if cell.tool != OURS:
            results.store(cell, {**head(cell), "failed": str(error).strip().splitlines()[-1]})
        return
    try:
        store(cell, made)
    except RuntimeError as error:
        tell(f"{cell.label}: NOT MEASURED: {str(error).strip()[-1500:]}")


def store(cell: Cell, made: list[Made]) -> None:
    qualities = measure(made, cell.model)
    found = results.summary(qualities, [one.cost for one in made])
    results.store(cell, {**head(cell), **found})
    mean, error = found["mean"], found["standard_error"]
    tell(f"{cell.label}: {mean['perplexity']:.4f} ± {error['perplexity']:.4f} KL {mean['kl']:.4f}")


def head(cell: Cell) -> dict[str, Any]:
    """How, when and with what a cell was made."""
    how = {"recipe_stages": list(cell.stages)} if cell.tool == OURS else {"flags": cell.flags}
    made_by = {**setting("benchmarks.quality.run"), "versions": versions(cell.tool)}
    return {**made_by, **how, "seeds": cell.seeds}


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [model.name for model in MODELS]
    parser.add_argument("--tools", nargs="+", choices=("ours", "peers"), default=["ours", "peers"])
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--rows", nargs="+", default=[], metavar="GROUP[/NAME]")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=REPO / "out" / "quality")
    parser.add_argument("--again", action="store_true", help="measure what is stored again too")
    parser.add_argument(
        "--quiet",
        type=float,
        metavar="SHARE",
        help="make every checkpoint anew, once others use less of the machine: for the seconds",
    )
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    for cell in cells(options):
        row = cell.row
        if options.again or not results.find(row.group, cell.model.name, row.name, cell.tool):
            work_on(cell, options.work, options.quiet)


if __name__ == "__main__":
    main()
