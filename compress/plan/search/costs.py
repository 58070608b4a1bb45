"""Losses that were measured of sizes, in the user's cache folder: another target on the same model
and data measures only what is new."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compress.checkpoint import Checkpoint, write_atomic
from compress.edits.distill import SOURCE, DistillConfig
from compress.edits.prune import PrunedSizes
from compress.errors import CompressError
from compress.plan.sensitivity_cache import data_hashes
from compress.recipe import EditStage, Recipe
from compress.usercache.place import cache_folder
from compress.version import VERSION as OURS

VERSION = 2  # of what is measured; goes up when the same inputs would give other numbers


@dataclass(slots=True)
class SizeCosts:
    """What is known, and where it is kept; None for nowhere.

    losses: nats a token by the sizes in words. order: blocks in the order in which they go.
    """

    path: Path | None = None
    losses: dict[str, float] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)

    def keep(self) -> None:
        """Store it. A folder that cannot be written is no reason to stop a run."""
        if self.path is None:
            return
        text = json.dumps({"losses": self.losses, "order": self.order}, indent=1)
        with suppress(OSError, CompressError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, text.encode())


def label_of(sizes: PrunedSizes) -> str:
    """The key of sizes: "ffn 512, layers 0 1 3"."""
    said = {key: value for key, value in asdict(sizes).items() if value is not None}
    if sizes.layers is not None:
        said["layers"] = " ".join(map(str, sizes.layers))
    return ", ".join(f"{key} {value}" for key, value in said.items()) or "whole"


def known_costs(
    recipe: Recipe, stage: EditStage, source: Checkpoint, arithmetic: Sequence[str]
) -> SizeCosts:
    """What other runs have kept. recipe: with the edits before the stage. source: of the run.
    arithmetic: device and dtype."""
    before = [x.config for x in recipe.edits if x.index < stage.index]
    trained = [x for x in before if isinstance(x, DistillConfig)]
    if any(x.sources is not None or x.teacher != SOURCE for x in trained):
        return SizeCosts()  # by texts or a model of its own, which nobody hashes
    path = cache_folder() / f"sizes-{_front(recipe, stage, source, arithmetic)}.json"
    try:
        held = json.loads(path.read_text())
        return SizeCosts(path, _losses(held["losses"]), [int(x) for x in held["order"]])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return SizeCosts(path)


def _losses(held: Mapping[str, Any]) -> dict[str, float]:
    losses = {str(key): float(value) for key, value in held.items()}
    if not all(math.isfinite(x) for x in losses.values()):
        raise ValueError
    return losses


def _front(recipe: Recipe, stage: EditStage, source: Checkpoint, arithmetic: Sequence[str]) -> str:
    assert recipe.calibration is not None, "the recipe parser asks for calibration"
    before = [x for x in recipe.edits if x.index < stage.index]
    facts = {
        "versions": [VERSION, OURS],
        "calibration": asdict(recipe.calibration),
        "data": [list(x) for x in data_hashes(recipe.calibration)],
        "edits": [[x.method, asdict(x.config)] for x in before],
        "seed": recipe.seed,
        "by": [stage.config.select, stage.config.repair],
        "source": [source.sha256(), dict(source.side_hashes())],
        "arithmetic": list(arithmetic),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return digest[:40]
