"""The main job: checkpoint in, recipe over it, smaller checkpoint and report out.

Everything is made in OUT.partial/ and becomes OUT by one rename at the very end; what is finished
stands in the journal there, so that a killed run goes on where it was.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from compress.arch.spec import DecoderSpec
from compress.checkpoint import (
    Checkpoint,
    claimed,
    disk,
    prepare_output,
    publish,
    resolve_model,
)
from compress.checkpoint.outline import outline_of
from compress.checkpoint.ties import settled
from compress.evaluation.compared import Compared
from compress.evaluation.quality import measure
from compress.evaluation.workspace import Workspace
from compress.events import Event, Progress, note, silent
from compress.formats import open_weights
from compress.machine.device import settle
from compress.machine.environment import fingerprint, peak_gpu_bytes, peak_rss_bytes
from compress.machine.other_work import read_processor, share_since
from compress.passes import journal as journals
from compress.passes.identity import marks
from compress.passes.journal import Journal
from compress.plan.passes import edited
from compress.plan.plan import Plan
from compress.plan.room import find_room
from compress.plan.source import open_source
from compress.plan.training.teachers import marks_of, sealed
from compress.recipe import Recipe, load
from compress.report.codec import read_json
from compress.report.schema import Export, Report, StageRecord
from compress.runs.artifacts import artifacts_of
from compress.runs.carry_out import carry_out
from compress.runs.measuring import chosen_by, measure_layers
from compress.runs.options import RunOptions
from compress.runs.output import (
    is_drawn,
    leaving_no_beginning,
    require_same_result,
    require_space,
    space_warnings,
    working_files,
)
from compress.runs.plain_rounding import plainly_rounded, why_not
from compress.runs.planning import in_room, plan_of
from compress.runs.requirements import check_requirements
from compress.runs.resumed import where_it_goes_on
from compress.runs.session import Session
from compress.runs.shared_text import shared_warnings
from compress.runs.summary import FOLDER, build_report, write_report
from compress.sharing.share import ready
from compress.usercache.cache import taken, user_cache


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
    overrides: "key.path=value" settings. options: device, dtype, resume, overwrite,
    push and track.

    Raises a CompressError for whatever the user can mend, before any work where possible.
    """
    started, options = datetime.now(UTC), options or RunOptions()
    share = ready(options.push, options.track, progress)
    session = prepare(
        recipe,
        model,
        out,
        overrides=overrides,
        options=options,
        progress=progress or silent,
    )
    output = session.output
    if output.state == "publish":
        with claimed(output):
            require_same_result(session.plan, session.checkpoint, output)
            publish(output, working_files(session.plan))
        report = _published_report(output.out)
        share.report(report, output.out / FOLDER, output.out)
        return report
    require_space(session.plan, output.partial, session.dtype)
    made = output.is_unmade
    with disk.spare_handle(), claimed(output):
        with leaving_no_beginning(output.partial, made=made):
            report = _work(session, started, resumed=output.state == "resume")
        publish(output, working_files(session.plan))
    share.report(report, output.out / FOLDER, output.out)
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
    asked, place = options.device, settle(options.device)
    device, options = place.name, replace(options, device=place.name)
    kept = user_cache(options.cache)
    checked = load(recipe, overrides)
    source = resolve_model(model)
    checkpoint, given = open_source(checked, source)
    output = prepare_output(out, source=source, overwrite=options.overwrite, resume=options.resume)
    plan, compute = plan_of(checked, checkpoint, given, options)
    room = replace(find_room(device), drawn=is_drawn(output))
    plan = in_room(plan, room)
    check_requirements(plan, checkpoint, compute, device, drawn=room.drawn)
    shared = shared_warnings(plan, checkpoint)
    settle(asked, progress)  # said where nothing cheap stands against the run
    checkpoint = _hashed(checkpoint, plan.source.spec, progress)
    weights = open_weights(checkpoint, plan.source.spec)
    teachers = sealed(plan.teachers)
    measuring = None
    if plan.budget is not None:  # what it chose by is now known to be of these weights
        given = edited(checked, outline_of(checkpoint, plan.source.spec), given.teachers)
        plan, compute = plan_of(checked, checkpoint, given, options)
        plan = in_room(plan, room)
    # What edits make of the model is measured once it is there.
    if plan.is_open and not plan.edits:
        found, measuring = measure_layers(plan, weights, checkpoint, device, progress)
        plan = chosen_by(found, plan, compute)
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
        teachers=teachers,
        shared=shared,
        kept=kept,
        passed_over=place.warnings,
    )


def _hashed(checkpoint: Checkpoint, spec: DecoderSpec, progress: Progress) -> Checkpoint:
    """The source as it is from now on, for the whole run: what is read is what was hashed."""
    began = time.perf_counter()
    # Whether head and embedding are alike was told by what they were before.
    checkpoint = settled(checkpoint.sealed(), spec)
    progress(Event("check", "source hashed", 1, 1, time.perf_counter() - began))
    return checkpoint


def _work(session: Session, started: datetime, *, resumed: bool) -> Report:
    """All passes, then evaluation and report, inside OUT.partial."""
    partial, journal = session.output.partial, _journal(session, resumed=resumed)
    if resumed:
        session.progress(note("resume", where_it_goes_on(session.plan, journal)))
    session, stages = carry_out(session, journal)
    plan = session.plan
    if session.measuring is not None:
        stages.append(session.measuring)
    clock, processor = time.perf_counter(), read_processor()
    place = Workspace(partial / "evaluation", session.device, session.progress, kept=session.kept)
    result = open_weights(Checkpoint.open(partial))
    rounded, reason = plainly_rounded(plan, session.weights, result), why_not(plan)
    sides = Compared(result, session.weights, rounded, reason)
    measured = measure(sides, plan.recipe.evaluation, place)
    if plan.recipe.evaluation is not None:
        seconds = time.perf_counter() - clock
        gpu = peak_gpu_bytes(session.device)
        others = share_since(processor)
        stages.append(StageRecord("evaluate", seconds, peak_rss_bytes(), gpu, others=others))
    artifacts = artifacts_of(session, journal)
    stages += [] if artifacts.stage is None else [artifacts.stage]
    for read in (session.checkpoint, *(x.checkpoint for x in session.teachers.values())):
        read.require_unchanged()  # the report says what it is
    report = build_report(session, stages, journal, measured, started)
    report = replace(
        report,
        exports=(*_of_file(plan, journal), *artifacts.rows),
        warnings=(*report.warnings, *artifacts.left_out),
        notes=(*report.notes, *taken(session.kept)),
    )
    write_report(report, partial)
    return report


def _of_file(plan: Plan, journal: Journal) -> tuple[Export, ...]:
    """How a result that is one file was proved."""
    if plan.file is None:
        return ()
    # Late, as for the pass that wrote it: only such a run loads transformers without data.
    from compress.runs.whole.into_file import file_rows

    return tuple(file_rows(plan, journal))


def _journal(session: Session, *, resumed: bool) -> Journal:
    """A new one, or that of the run that is resumed."""
    plan, partial = session.plan, session.output.partial
    environment = fingerprint(session.device, session.dtype) | marks_of(session.teachers)
    mine = marks(plan.asked, session.sha256, session.side_files, environment)
    begin = journals.resume if resumed else journals.start
    return begin(partial, mine, session.device)


def _published_report(out: Path) -> Report:
    return read_json(out / FOLDER / "report.json")
