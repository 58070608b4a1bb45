"""Sensitivities for a recipe with a target, measured on the model whose layers are rounded."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from compress.checkpoint import Checkpoint
from compress.events import Progress, note
from compress.formats import Weights
from compress.machine.environment import peak_gpu_bytes, peak_rss_bytes
from compress.machine.other_work import read_processor, share_since
from compress.passes.journal import MEASURED, PassJournal
from compress.plan import sensitivity_cache
from compress.plan.budget import BudgetUnit, Sensitivities, budget_units
from compress.plan.passes import PassPlan
from compress.plan.plan import Plan
from compress.plan.search.bits import SharedBytes
from compress.plan.sensitivity_cache import Measurement, measurement
from compress.report.schema import StageRecord
from compress.runs.planning import in_room, measured_on, plan_with_choice, with_left


def measure_layers(
    plan: Plan, model: Weights, source: Checkpoint, device: str, progress: Progress
) -> tuple[Sensitivities, StageRecord]:
    """What every layer loses under each candidate, kept for other runs, and what it took.

    model: what the stages round. source: of the run; another where edits come first.
    """
    units, measured = _sought(plan)
    began, processor = time.perf_counter(), read_processor()
    found = _measured(units, measured, model, device, progress)
    sensitivity_cache.keep(found, units, measured, source, device)
    spent, gpu = time.perf_counter() - began, peak_gpu_bytes(device)
    others = share_since(processor)
    return found, StageRecord("measure", spent, peak_rss_bytes(), gpu, others=others)


def shared_bytes(
    plan: Plan,
    planned: PassPlan,
    model: Weights,
    source: Checkpoint,
    device: str,
    progress: Progress,
) -> SharedBytes | None:
    """What an edit and a stage behind it share, with what layers lose before the cut; None for one
    that shares nothing. model: what the edit reads. source: of the run."""
    space, stage = planned.space, planned.stage
    if space is None or stage is None or not space.shared:
        return None
    before = tuple(x for x in plan.recipe.edits if x.index < stage.index)
    recipe, outline = replace(plan.given, edits=before), planned.source
    units, measured = (
        budget_units(recipe, outline),
        measurement(recipe, measured_on(recipe, outline)),
    )
    found = sensitivity_cache.find(units, measured, source, device)
    if found is None:
        found = _measured(units, measured, model, device, progress)
        sensitivity_cache.keep(found, units, measured, source, device)
    return SharedBytes(recipe, outline, found, space.limit)


def _measured(
    units: Sequence[BudgetUnit],
    measured: Measurement,
    model: Weights,
    device: str,
    progress: Progress,
) -> Sensitivities:
    # Late: a data-free run never loads transformers.
    from compress.passes.quantize.sensitivity import measure

    progress(note("measure", "what every layer loses under each candidate"))
    with tempfile.TemporaryDirectory(prefix="compress-model-") as folder:
        return measure(units, measured.config, model, device, Path(folder), progress)


def chosen_by(found: Sensitivities, plan: Plan, compute: torch.dtype) -> Plan:
    """The plan with the schemes that the targets choose by them."""
    units, _ = _sought(plan)
    # What was measured of open edits stays known.
    recipe = with_left(replace(plan.given, edits=plan.recipe.edits), plan)
    made = plan_with_choice(recipe, units, found, plan.model, compute)
    return in_room(replace(made, bytes_range=plan.bytes_range), plan.room)


def cached(plan: Plan, source: Checkpoint, device: str) -> Sensitivities | None:
    """Those that another run kept; None where there are none. source: of the run."""
    units, measured = _sought(plan)
    return sensitivity_cache.find(units, measured, source, device)


def _sought(plan: Plan) -> tuple[tuple[BudgetUnit, ...], Measurement]:
    """Whose sensitivities, and on which data."""
    recipe, model = plan.given, plan.rounded
    units = budget_units(recipe, model, plan.source)
    return units, measurement(recipe, measured_on(recipe, model))


def recorded(part: PassJournal) -> Sensitivities | None:
    """Those that an earlier process of the run measured."""
    held = part.units.get(MEASURED)
    return None if held is None else Sensitivities(held["shares"], held["errors"])


def record(found: Sensitivities, part: PassJournal) -> None:
    """So that a resumed run chooses by the same, whatever became of the cache."""
    part.record(MEASURED, {"shares": dict(found.shares), "errors": dict(found.errors)})
