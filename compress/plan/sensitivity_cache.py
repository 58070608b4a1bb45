"""Sensitivities in the user's cache folder, so that another target on the same model costs nothing.

A file's name holds two hashes: of all that the numbers depend on beside the source's weights, and
of those. The first is cheap, so a plan reads the weights only where a file of that name lies.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from compress.checkpoint import Checkpoint, write_atomic
from compress.edits import EDITS
from compress.edits.distill import DistillConfig
from compress.errors import CompressError, DataError
from compress.plan.budget import BudgetUnit, Sensitivities
from compress.recipe import EditStage, Recipe
from compress.usercache.place import cache_folder
from compress.version import VERSION as OURS
from compress_calibration.config import CalibrationConfig
from compress_calibration.readers import source_files

VERSION = 2  # of what is measured; goes up when the same inputs would give other numbers


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is measured: on which data, and of the model behind which edits of the source.

    shown: the calibration data that those edits look at; None where none does. seed: the recipe's,
    by which a training draws its rows.
    """

    config: CalibrationConfig
    edits: tuple[EditStage, ...] = ()
    shown: CalibrationConfig | None = None
    seed: int = 0


def measurement(recipe: Recipe, config: CalibrationConfig) -> Measurement:
    """Of the model that a recipe's edits leave. config: the data that is measured on."""
    if not any(EDITS[edit.method].needs_data for edit in recipe.edits):
        return Measurement(config, recipe.edits)
    return Measurement(config, recipe.edits, recipe.calibration, recipe.seed)


def find(
    units: Sequence[BudgetUnit], measured: Measurement, checkpoint: Checkpoint, device: str
) -> Sensitivities | None:
    """What was measured before for just these units, data and weights; None where nothing was.

    checkpoint: the source of the run, before its edits.
    """
    front = _front(units, measured, checkpoint, device)
    folder = cache_folder()
    if not any(folder.glob(f"{front}-*.json")):
        return None
    return _read(folder / f"{front}-{checkpoint.sha256()[:20]}.json", units)


def keep(
    found: Sensitivities,
    units: Sequence[BudgetUnit],
    measured: Measurement,
    checkpoint: Checkpoint,
    device: str,
) -> None:
    """Store them for `find`. A folder that cannot be written is no reason to stop a run."""
    front = _front(units, measured, checkpoint, device)
    path = cache_folder() / f"{front}-{checkpoint.sha256()[:20]}.json"
    text = json.dumps({"shares": found.shares, "errors": found.errors}, indent=1)
    with suppress(OSError, CompressError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())


def _read(path: Path, units: Sequence[BudgetUnit]) -> Sensitivities | None:
    """None also for a file that holds anything else than numbers for all units."""
    try:
        held = json.loads(path.read_text())
        found = Sensitivities(held["shares"], held["errors"])
        losses = [found.loss(unit, scheme) for unit in units for scheme in unit.schemes]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return found if all(math.isfinite(loss) and loss >= 0 for loss in losses) else None


def _front(
    units: Sequence[BudgetUnit], measured: Measurement, checkpoint: Checkpoint, device: str
) -> str:
    config = measured.config
    facts = {
        "versions": [VERSION, OURS],
        "units": [_unit(unit) for unit in units],
        "calibration": asdict(config),
        "data": [[name, digest] for name, digest in data_hashes(config)],
        "edits": [[stage.method, asdict(stage.config)] for stage in measured.edits],
        "source": [list(checkpoint.files), dict(checkpoint.side_hashes())],
        "device": device.partition(":")[0],
    }
    if measured.shown is not None:
        facts["shown"] = [asdict(measured.shown), measured.seed, *_trained_on(measured)]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return f"sensitivity-{digest[:20]}"


def _trained_on(measured: Measurement) -> Iterator[list[str]]:
    """Files of texts that edits have for themselves, each with its hash."""
    for stage in measured.edits:
        if isinstance(stage.config, DistillConfig) and stage.config.sources is not None:
            own = replace(measured.config, sources=stage.config.sources)
            yield from ([name, digest] for name, digest in data_hashes(own))


def _unit(unit: BudgetUnit) -> list[Any]:
    schemes = [asdict(scheme) for scheme in unit.schemes]
    names = [x.name for x in unit.linears]
    return [unit.block, names, schemes, unit.sensitivity, unit.signs]


def data_hashes(config: CalibrationConfig) -> Iterator[tuple[str, str]]:
    """Every file that the calibration text comes from, with its hash; a hub data set is told by its
    name, which the configuration has. What is missing is for the checks of inputs to say."""
    for source in config.sources:
        named: list[Path] = []
        with suppress(DataError):
            named = source_files(source)
        for path in named:
            inside = path.rglob("*") if path.is_dir() else [path]
            for file in sorted(p for p in inside if p.is_file()):
                with file.open("rb") as opened:
                    yield str(file), hashlib.file_digest(opened, "sha256").hexdigest()
