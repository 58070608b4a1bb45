"""The main job: checkpoint in, recipe over it, smaller checkpoint and report out.

Everything is made in OUT.partial/ and becomes OUT by one rename at the very end; what is finished
stands in the journal there, so that a killed run goes on where it was.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from compress.arch.spec import DecoderSpec
from compress.artifacts.recipe_exports import make_artifacts
from compress.checkpoint import (
    Checkpoint,
    ShardWriter,
    claimed,
    disk,
    prepare_output,
    publish,
    resolve_model,
)
from compress.checkpoint.ties import settled
from compress.evaluation.quality import measure
from compress.evaluation.workspace import Workspace
from compress.events import Event, Progress, note, silent
from compress.formats import Weights, open_weights
from compress.machine.environment import check_device, fingerprint, peak_gpu_bytes, peak_rss_bytes
from compress.machine.other_work import read_processor, share_since
from compress.passes import journal as journals
from compress.passes import outliers
from compress.passes.context import PassContext
from compress.passes.identity import marks, refuse_other_result
from compress.passes.quantize import stream
from compress.plan import sensitivity_cache
from compress.plan.budget import budget_units
from compress.plan.plan import Plan
from compress.plan.room import find_room
from compress.plan.source import open_source
from compress.recipe import Recipe, load
from compress.report.codec import read_json
from compress.report.schema import Report, StageRecord
from compress.runs.finish import finish_files
from compress.runs.options import RunOptions
from compress.runs.output import (
    CALIBRATION_FILE,
    is_drawn,
    leaving_no_beginning,
    require_space,
    space_warnings,
)
from compress.runs.planning import in_room, measured_on, plan_of, plan_with_choice
from compress.runs.requirements import check_requirements
from compress.runs.session import Session
from compress.runs.summary import FOLDER, build_report, layers_of, write_report

# The run's own files inside OUT.partial, gone when it is published.
WORKING = (
    *("journal.json", CALIBRATION_FILE, "hidden.0", "hidden.1", "evaluation"),
    outliers.WORKING,
)


def run(
    recipe: Recipe | str | Path,
    model: str | Path,
    out: str | Path,
    *,
    overrides: Sequence[str] = (),
    options: RunOptions | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compress the checkpoint `model` as `recipe` says into the folder `out`.

    recipe: a Recipe, a file, or the name of a built-in one. model: a folder or a hub id.
    overrides: "key.path=value" settings. options: device, dtype, resume and overwrite.

    Raises a CompressError for whatever the user can mend, before any work where possible.
    """
    started = datetime.now(UTC)
    session = prepare(
        recipe,
        model,
        out,
        overrides=overrides,
        options=options or RunOptions(),
        progress=progress or silent,
    )
    output = session.output
    if output.state == "publish":
        with claimed(output):
            recipe, complete = session.plan.recipe, output.complete
            refuse_other_result(complete, recipe, session.sha256, session.side_files)
            publish(output, WORKING)
        return _published_report(output.out)
    require_space(session.plan, output.partial, session.dtype)
    made = not output.partial.exists()
    with disk.spare_handle(), claimed(output):
        with leaving_no_beginning(output.partial, made=made):
            report = _work(session, started, resumed=output.state == "resume")
        publish(output, WORKING)
    return report


def prepare(
    recipe: Recipe | str | Path,
    model: str | Path,
    out: str | Path,
    *,
    overrides: Sequence[str],
    options: RunOptions,
    progress: Progress,
) -> Session:
    """Check everything that can be checked before work: recipe, source, fit, output, device."""
    device, dtype = options.device, options.dtype
    check_device(device)
    checked = load(recipe, overrides)
    source = resolve_model(model)
    checkpoint = open_source(checked, source)
    output = prepare_output(out, source=source, overwrite=options.overwrite, resume=options.resume)
    plan, compute = plan_of(checked, checkpoint, device, dtype)
    room = replace(find_room(device), drawn=is_drawn(output))
    plan = in_room(plan, room)
    check_requirements(plan, checkpoint, compute, device, drawn=room.drawn)
    checkpoint = _hashed(checkpoint, plan.spec, progress)
    weights = open_weights(checkpoint, plan.spec)
    measuring = None
    if plan.budget is not None:  # what it chose by is now known to be of these weights
        plan, compute = plan_of(checked, checkpoint, device, dtype)
        plan = in_room(plan, room)
    if plan.budget is not None and plan.budget.is_open:
        plan, measuring = _measured_plan(checked, weights, device, compute, progress)
        plan = in_room(plan, room)
    if output.state != "publish":
        tight = space_warnings(plan, output.partial, compute)
        plan = replace(plan, warnings=(*plan.warnings, *tight))
    return Session(
        plan,
        checkpoint,
        weights,
        output,
        compute,
        device,
        checkpoint.sha256(),
        checkpoint.side_hashes(),
        progress,
        measuring,
    )


def _hashed(checkpoint: Checkpoint, spec: DecoderSpec, progress: Progress) -> Checkpoint:
    """The source as it is from now on, for the whole run: what is read is what was hashed."""
    began = time.perf_counter()
    # Whether head and embedding are alike was told by what they were before.
    checkpoint = settled(checkpoint.sealed(), spec)
    progress(Event("check", "source hashed", 1, 1, time.perf_counter() - began))
    return checkpoint


def _measured_plan(
    recipe: Recipe, weights: Weights, device: str, compute: torch.dtype, progress: Progress
) -> tuple[Plan, StageRecord]:
    """The plan of a recipe with a target whose sensitivities are not known yet, and what it took to
    measure them."""
    # Late: a data-free run never loads transformers.
    from compress.passes.quantize.sensitivity import measure

    checkpoint = weights.checkpoint
    units, config = budget_units(recipe, checkpoint), measured_on(recipe, checkpoint)
    began, processor = time.perf_counter(), read_processor()
    progress(note("measure", "what every layer loses under each candidate"))
    with tempfile.TemporaryDirectory(prefix="compress-model-") as folder:
        found = measure(units, config, weights, device, Path(folder), progress)
    sensitivity_cache.keep(found, units, config, checkpoint, device)
    spent = time.perf_counter() - began
    others = share_since(processor)
    stage = StageRecord("measure", spent, peak_rss_bytes(), peak_gpu_bytes(device), others=others)
    return plan_with_choice(recipe, units, found, checkpoint, compute), stage


def _work(session: Session, started: datetime, *, resumed: bool) -> Report:
    """All passes, then evaluation and report, inside OUT.partial."""
    plan, partial = session.plan, session.output.partial
    work = _begin(session, resumed=resumed)
    _quantize(work, partial)
    layers = layers_of(plan, work.journal)
    stages = [StageRecord("quantize", **asdict(work.journal.spent_so_far()), layers=layers)]
    if session.measuring is not None:
        stages.append(session.measuring)
    clock, processor = time.perf_counter(), read_processor()
    place = Workspace(partial / "evaluation", session.device, session.progress)
    measured = measure(partial, session.weights, plan.recipe.evaluation, place)
    if plan.recipe.evaluation is not None:
        seconds = time.perf_counter() - clock
        gpu = peak_gpu_bytes(session.device)
        others = share_since(processor)
        stages.append(StageRecord("evaluate", seconds, peak_rss_bytes(), gpu, others=others))
    artifacts = make_artifacts(plan.recipe, partial, session.progress)
    stages += [] if artifacts.stage is None else [artifacts.stage]
    session.checkpoint.require_unchanged()  # the report says what it is
    report = build_report(session, stages, work.journal, measured, started)
    report = replace(
        report, exports=artifacts.rows, warnings=(*report.warnings, *artifacts.left_out)
    )
    write_report(report, partial)
    return report


def _begin(session: Session, *, resumed: bool) -> PassContext:
    """Weight files and journal: new ones, or those of the run that is resumed."""
    plan, partial = session.plan, session.output.partial
    environment = fingerprint(session.device, session.dtype)
    mine = marks(plan.recipe, session.sha256, session.side_files, environment)
    if resumed:
        journal = journals.resume(partial, mine, session.device)
        # Files that recorded units have written to are never made anew: holes read as zeros.
        open_shards = ShardWriter.reopen if journal.has_work else ShardWriter.create
        writer = open_shards(partial, plan.shards)
    else:
        writer = ShardWriter.create(partial, plan.shards)
        journal = journals.start(partial, mine, session.device)
    return PassContext(
        plan,
        session.checkpoint,
        session.weights,
        writer,
        journal,
        session.progress,
        session.dtype,
        session.device,
    )


def _quantize(work: PassContext, partial: Path) -> None:
    """Every unit that the journal does not have, then the small files."""
    earlier = frozenset(work.journal.units)
    if work.plan.needs_calibration:
        # Late: a data-free run never loads transformers.
        from compress.passes.quantize.calibrated import calibrate

        calibrate(work, partial)
    else:
        stream.run(work)
    finish_files(work, partial, earlier)


def _published_report(out: Path) -> Report:
    return read_json(out / FOLDER / "report.json")
