"""One row of the matrix of exports: what is exported, made and exported to every target.

    python -m benchmarks.export.matrix_row BLOCK NAME FOLDER

Works in FOLDER, with tests/ on the path of Python, and prints its cells as JSON. An export is the
one of `compress-model export`, its proof included.
"""

import json
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from benchmarks.export.matrix_rows import ROWS, TARGETS, VARIANTS, Row
from benchmarks.processes import REPO
from compress import verbs
from compress.checkpoint import Checkpoint
from compress.errors import CompressError
from compress.formats import open_weights
from compress.recipe.reading.parse import parse
from compress_exporters.exporter import Options
from compress_exporters.reference import Reference, text
from helpers import tiny_models

Cell = dict[str, Any]
# Options that a refusal may name.
LIFTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"--round-scales": {"round_scales": True}, "--accuracy-level 0": {"accuracy_level": 0}}
)


def model(row: Row, folder: Path) -> Path:
    if row.family is None:
        return REPO / "examples" / "tale-6m"
    return Path(tiny_models.make(row.family, folder, **row.options))


def made(row: Row, folder: Path) -> dict[str, Path]:
    """What is exported, by name."""
    source, found = model(row, folder / "source"), {}
    for name, recipe in row.recipes.items():
        found[name] = source
        if recipe is not None:
            found[name] = folder / name
            verbs.run(parse(yaml.safe_dump(json.loads(json.dumps(recipe)))), source, folder / name)
    return found


def largest_logit(source: Path) -> float | None:
    """None of a family that our engine does not compute."""
    weights = open_weights(Checkpoint.open(source))
    try:
        return float(Reference.load(weights).logits(text(weights)).abs().max())
    except CompressError:
        return None


def cell(source: Path, target: str, dtype: Any, out: Path) -> Cell:
    """What became of one export; one whose refusal names an option is tried with it again."""
    try:
        found = _exported(source, target, Options(dtype), out)
        option = next((name for name in LIFTS if name in found.get("reason", "")), None)
        if option is None:
            return found
        again = _exported(source, target, replace(Options(dtype), **LIFTS[option]), out)
        return again | {"option": option, "without": found["reason"]}
    except Exception as error:  # the table tells a fault of ours as well
        traceback.print_exc()
        return {"outcome": "crashed", "reason": repr(error)}


def _exported(source: Path, target: str, options: Options, out: Path) -> Cell:
    try:
        report = verbs.export_artifact(
            source, verbs.ArtifactTarget(target, options), out, overwrite=True
        )
    except CompressError as refusal:
        proof = _is_of_the_proof(source, target, options, out)
        reason = str(refusal).replace(f"{source}/", "").replace(f"{source}: ", "")
        return {"outcome": "wrong" if proof else "refused", "reason": reason}
    (row,) = report.exports
    return {
        "outcome": "yes",
        "level": row.proof,
        "error": row.max_logit_error,
        "detail": list(report.detail),
        "notes": list(report.notes),
    }


def _is_of_the_proof(source: Path, target: str, options: Options, out: Path) -> bool:
    """Whether a refused export is written where nothing is compared."""
    try:
        verbs.export_artifact(
            source, verbs.ArtifactTarget(target, options), out, verify=False, overwrite=True
        )
    except CompressError:
        return False
    return True


def main(arguments: list[str]) -> None:
    block, name, place = arguments
    (row,) = (row for row in ROWS if (row.block, row.name) == (block, name))
    folder, cells = Path(place), []
    sources = made(row, folder)
    largest = {what: largest_logit(source) for what, source in sources.items()}
    for variant, (what, dtype) in VARIANTS[block].items():
        for target in TARGETS:
            found = cell(sources[what], target, dtype, folder / "out")
            at = {"block": block, "row": name, "target": target, "variant": variant}
            cells.append({**at, "largest_logit": largest[what], **found})
    print(json.dumps(cells))


if __name__ == "__main__":
    main(sys.argv[1:])
