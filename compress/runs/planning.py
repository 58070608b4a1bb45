"""A plan for a checkpoint and a recipe on this machine, with what would stop a run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from compress.checkpoint import Checkpoint, prepare_output, resolve_model
from compress.checkpoint.outline import Outline
from compress.errors import RecipeError
from compress.machine.device import settle
from compress.machine.environment import compute_dtype
from compress.plan import sensitivity_cache
from compress.plan.budget import (
    BudgetUnit,
    Sensitivities,
    budget_units,
    waits_for_prune,
    with_choice,
)
from compress.plan.lengths import cap_defaults
from compress.plan.passes import EditedModel, edited
from compress.plan.plan import Plan, build_plan
from compress.plan.room import Room, find_room, fitting_needs, left_out, memory_warnings
from compress.plan.search.bits import DIGITS, budget_of
from compress.plan.search.space import limit_of
from compress.plan.sensitivity_cache import measurement
from compress.plan.source import open_source
from compress.recipe import Recipe, load
from compress.recipe.schema import Target
from compress.runs.options import RunOptions
from compress.runs.output import run_checks, space_warnings
from compress.runs.requirements import problems, requirement_checks
from compress.runs.shared_text import shared_warnings
from compress.runs.size_range import result_range
from compress_calibration.config import CalibrationConfig

MEASURED_TOKENS = 16_384  # of the calibration data that sensitivities are measured on


def make_plan(
    recipe: Recipe | str | Path,
    model: str | Path,
    *,
    overrides: Sequence[str] = (),
    options: RunOptions | None = None,
    out: str | Path | None = None,
    memory: int | None = None,
) -> Plan:
    """What `run` would do, decided without any work. Raises as `run` does where there can be no
    plan; what would stop the run beside that is in the plan's `problems`.

    out: also look at the folder that the run would write, and at its disk.
    memory: bytes of another machine, to plan for; times stay those of this one.
    """
    options = options or RunOptions()
    place = settle(options.device)
    device, options = place.name, replace(options, device=place.name)
    source = resolve_model(model)
    checked = load(recipe, overrides)
    checkpoint, given = open_source(checked, source)
    plan, compute = plan_of(checked, checkpoint, given, options)
    plan = in_room(plan, find_room(device, memory))
    left, shared = left_out(plan.run_size, plan.room), shared_warnings(plan, checkpoint)
    plan = replace(plan, warnings=(*plan.warnings, *left, *shared))
    if out is not None and Path(out).absolute().parent.is_dir():
        folder = Path(f"{out}.partial").absolute()
        plan = replace(plan, warnings=(*plan.warnings, *space_warnings(plan, folder, compute)))
    if out is None:
        checks = requirement_checks(plan, checkpoint, compute, device, drawn=False)
    else:
        checks = run_checks(
            plan,
            checkpoint,
            compute,
            device,
            lambda: prepare_output(
                out, source=source, overwrite=options.overwrite, resume=options.resume
            ),
        )
    return replace(plan, problems=problems(checks), device=place)


def in_room(plan: Plan, room: Room) -> Plan:
    """The plan with its memory held against `room`: warnings, and needs of what is not left out."""
    needs = fitting_needs(plan.run_size, room)
    return replace(
        plan,
        room=room,
        estimate=replace(plan.estimate, needs=needs),
        warnings=(*plan.warnings, *memory_warnings(plan.run_size, room)),
    )


def plan_of(
    recipe: Recipe, checkpoint: Checkpoint, model: EditedModel, options: RunOptions
) -> tuple[Plan, torch.dtype]:
    """The plan and the dtype of calibrated passes. model: that of `checkpoint`."""
    compute = compute_dtype(model.rounded.main_dtype, options.device, options.dtype)
    units = budget_units(recipe, model.rounded, model.source)
    if not units:
        plan = build_plan(recipe, model, dtype=compute)
        return replace(plan, bytes_range=result_range(recipe, model, compute)), compute
    measured = measurement(recipe, measured_on(recipe, model.rounded))
    found = None
    if not waits_for_prune(recipe):
        found = sensitivity_cache.find(units, measured, checkpoint, options.device)
    plan = plan_with_choice(recipe, units, found, model, compute)
    return replace(plan, bytes_range=result_range(recipe, model, compute)), compute


def plan_with_choice(
    recipe: Recipe,
    units: Sequence[BudgetUnit],
    found: Sensitivities | None,
    model: EditedModel,
    compute: torch.dtype,
) -> Plan:
    """The plan with the schemes that the targets choose; with the smallest, where nothing is
    measured yet."""
    settled, budget = with_choice(recipe, units, found)
    plan = build_plan(settled, model, dtype=compute)
    if budget.is_open:
        measured = replace(plan.run_size, measured=measured_on(recipe, plan.rounded))
        plan = replace(plan, run_size=measured)
    return replace(plan, given=recipe, budget=budget, warnings=(*plan.warnings, *budget.notes))


def replanned(plan: Plan, recipe: Recipe, compute: torch.dtype) -> Plan:
    """The plan with what a measurement has said of an edit.

    recipe: as it was given, with that. The plan goes on knowing the recipe that was given, and
    between how many bytes the result was said to lie before any work.
    """
    model = edited(recipe, plan.source, plan.teachers)
    units = budget_units(recipe, model.rounded, model.source)
    made = plan_with_choice(recipe, units, None, model, compute) if units else None
    if made is not None and waits_for_prune(recipe):
        known = with_left(recipe, replace(made, given=plan.given))
        made = plan_with_choice(known, units, None, model, compute)
    made = made or build_plan(recipe, model, dtype=compute)
    roomy = in_room(made, plan.room)
    # The time that was promised is that of the search, too.
    before = plan.estimate
    promised = replace(roomy.estimate, seconds=before.seconds, times=before.times)
    between = plan.bytes_range
    return replace(roomy, given=plan.given, bytes_range=between, estimate=promised)


def with_left(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe with what its prune leaves of shared bytes for the stage that shares them; as it
    is where nothing is shared, or the sizes are not known yet.

    plan: with the smallest schemes. RecipeError where these take more.
    """
    shared = next((x for x in recipe.stages if x.target is not None and x.target.of), None)
    if shared is None or any(x.is_open for x in recipe.edits):
        return recipe
    config = budget_of(plan.given)
    assert config is not None, "the recipe parser asks for a prune in front"
    stage = next(x for x in plan.given.edits if x.config is config)
    planned = next(x for x in plan.edits if x.stage is not None and x.stage.index == stage.index)
    limit = limit_of(plan.source, planned.source, config)
    smallest = sum(min(unit.sizes) for unit in budget_units(recipe, plan.rounded))
    left = limit - DIGITS * len(plan.shards.tensors) - (plan.shards.total_bytes - smallest)
    if left < smallest:
        raise RecipeError(
            f"{shared.at('candidates')}: the smallest of them take {smallest} bytes, and {left} of"
            f" {limit} are left; raise the budget"
        )
    known = replace(shared, target=Target(bytes=left))
    return replace(recipe, stages=tuple(known if x is shared else x for x in recipe.stages))


def measured_on(recipe: Recipe, model: Outline) -> CalibrationConfig:
    """What sensitivities are measured on: the recipe's calibration data, as many rows as are needed
    for errors that are only averaged and never inverted."""
    config = cap_defaults(recipe, model.spec.context)[0].calibration
    assert config is not None, "the recipe parser asks for calibration where a stage has a target"
    return replace(config, samples=min(config.samples, max(1, MEASURED_TOKENS // config.length)))
