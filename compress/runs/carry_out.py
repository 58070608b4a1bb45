"""Carries out the passes of a run; each reads the model that the pass before it wrote.

The last pass writes into OUT.partial itself. An earlier one writes a checkpoint of its own,
OUT.partial/stage.N, which is removed as soon as no pass will read it any more.
"""

from dataclasses import asdict, replace
from pathlib import Path

from compress.checkpoint import Checkpoint, ShardWriter, disk
from compress.checkpoint.jsonfile import as_json
from compress.errors import OutputError
from compress.events import note
from compress.formats import Weights, open_weights
from compress.passes import journal as journals
from compress.passes.context import PassContext
from compress.passes.edit import WRITTEN
from compress.passes.journal import Journal, PassJournal, Spent
from compress.passes.quantize import stream
from compress.passes.structure.files import candidates_of, repairs_of
from compress.passes.training.units import courses_of
from compress.plan.passes import PassPlan
from compress.plan.plan import Plan
from compress.report.records.loads import StockLoad
from compress.report.schema import StageRecord
from compress.runs import measuring
from compress.runs.apply_pass import apply_pass, units_of
from compress.runs.card import config_files
from compress.runs.finish import finish_between, finish_result
from compress.runs.output import PROOF, require_space, space_warnings
from compress.runs.planning import replanned
from compress.runs.reading import models_needed, models_read
from compress.runs.session import Session
from compress.runs.summary import layers_of


def carry_out(session: Session, journal: Journal) -> tuple[Session, list[StageRecord]]:
    """Carry out all passes, without the units that the journal has as finished.

    Returns the session and a record of each pass. Where a target needs sensitivities of the model
    that the edits leave, they are settled after the edits: the session then has the plan with the
    schemes chosen by them, and a measurement has a record too.
    """
    stages: list[StageRecord] = []
    made: Checkpoint | None = None
    for index in range(len(session.plan.edits)):
        session = _chosen(session, journal, index, made)
        stage, made = _edit(session, journal, index, made)
        stages.append(stage)
    if session.plan.budget is not None and session.plan.edits:
        session, measurement = _settled(session, journal, made)
        stages += [] if measurement is None else [measurement]
    if session.plan.recipe.stages:
        stage, made = _rounding(session, journal, made)
        stages.append(stage)
    for index, planned in enumerate(session.plan.passes):
        if planned.tunes:
            stage, made = _edit(session, journal, index, made)
            stages.append(stage)
    return replace(session, loads=_loads(journal)), stages


def _chosen(session: Session, journal: Journal, index: int, made: Checkpoint | None) -> Session:
    """The session with what edit `index` will do, where that has to be measured first.

    The journal has what was chosen, so a resumed run goes on with it.
    """
    plan = session.plan
    stage = plan.edits[index].stage
    if stage is None or not stage.is_open:
        return session
    # Late: an edit by tensor never loads transformers.
    from compress.passes.structure.choices import choose, settled
    from compress.passes.structure.tokens import Looking

    part = journal.begin(plan.edits[index].name)
    if journals.CHOSEN not in part.units:
        model = _model(session, journal, index, made)
        told = session.progress
        shared = measuring.shared_bytes(
            plan, plan.edits[index], model, session.checkpoint, session.device, told
        )
        how = (session.dtype, session.device)
        look = Looking(plan, model, part, told, *how, shared=shared, kept=session.kept)
        choose(look, stage, session.weights, session.output.partial)
    known = settled(stage, part.units[journals.CHOSEN])
    edits = tuple(known if x.index == stage.index else x for x in plan.recipe.edits)
    recipe = replace(plan.given, edits=edits)
    return replace(session, plan=replanned(plan, recipe, session.dtype))


def _edit(
    session: Session, journal: Journal, index: int, made: Checkpoint | None
) -> tuple[StageRecord, Checkpoint | None]:
    """Carry out pass `index`, of an edit or of a training behind the stages that round, or what a
    killed run left to do of it.

    made: what the pass before it wrote, where this process hashed it. Returns the record of the
    pass, and the same of what this one wrote.
    """
    plan = session.plan
    planned, is_last = plan.passes[index], len(plan.passes) == index + 1
    begun = journal.passes.get(planned.name)
    if begun is not None and journals.WHOLE in begun.units:
        _remove_read(session, index)
        return _told(planned, begun, begun.spent), None
    part = journal.begin(planned.name)
    earlier = [x for unit in part.units.values() for x in unit.get(WRITTEN, ())]
    folder = _folder(session, planned)
    writer = _writer(part, folder, planned)
    if not set(units_of(planned)) <= part.units.keys():
        model = _model(session, journal, index, made)
        dense = _model(session, journal, len(plan.edits), None) if planned.moves_codes else None
        apply_pass(session, _context(session, part, writer, model), planned, dense)
    written = _finish(session, planned, writer, earlier)
    _prove(session, part, folder, planned)
    if written is not None:
        part.record(journals.WHOLE, {"sha256": written.sha256()})
    _remove_read(session, index)
    record = _told(planned, part, part.spent_so_far())
    last_edit = is_last and not planned.tunes
    return replace(record, layers=layers_of(plan, {}) if last_edit else ()), written


def _finish(
    session: Session, planned: PassPlan, writer: ShardWriter, earlier: list[str]
) -> Checkpoint | None:
    """Make a checkpoint of what a pass wrote; one that a next pass reads is returned."""
    plan = session.plan
    if planned is plan.passes[-1]:
        finish_result(plan, writer, earlier, session.checkpoint)
        return None
    rounded = planned.tunes or planned.stage is None
    files = config_files(plan) if rounded else {"config.json": as_json(dict(planned.result.config))}
    finish_between(writer, earlier, files, session.checkpoint)
    return Checkpoint.open(writer.folder).sealed()


def _told(planned: PassPlan, part: PassJournal, spent: Spent) -> StageRecord:
    """The record of the pass of an edit."""
    repairs, courses = repairs_of(part.units), courses_of(part.units)
    tried = candidates_of(part.units)
    return StageRecord(
        planned.label, **asdict(spent), repairs=repairs, courses=courses, candidates=tried
    )


def _prove(session: Session, part: PassJournal, folder: Path, planned: PassPlan) -> None:
    """Have a fresh process load what the last edit but for those by tensor left, and record how."""
    last = [each for each in session.plan.edits if each.is_proved][-1:]
    if last != [planned] or journals.LOADS in part.units:
        return
    # Late: an edit by tensor never loads transformers.
    from compress.proof.loads import prove_load

    session.progress(note("prove", "a fresh process loads the model in plain transformers"))
    weights = open_weights(Checkpoint.open(folder), planned.result.spec)
    work = session.output.partial / PROOF
    found = prove_load(weights, session.checkpoint.small, work)
    part.record(journals.LOADS, asdict(found))


def _loads(journal: Journal) -> StockLoad | None:
    """What a fresh process found of what the edits left; None where it was not asked."""
    found = [x.units[journals.LOADS] for x in journal.passes.values() if journals.LOADS in x.units]
    return StockLoad(**{**found[-1], "detail": tuple(found[-1]["detail"])}) if found else None


def _rounding(
    session: Session, journal: Journal, made: Checkpoint | None
) -> tuple[StageRecord, Checkpoint | None]:
    """Carry out the pass that rounds, or what a killed run left to do of it; returns as `_edit`."""
    plan, index = session.plan, len(session.plan.edits)
    planned = plan.rounding
    begun = journal.passes.get(planned.name)
    if begun is not None and journals.WHOLE in begun.units:
        _remove_read(session, index)
        return _rounded(plan, begun, begun.spent), None
    part = journal.begin(planned.name)
    if plan.file is not None:
        # Late: only a run that rounds into a file loads transformers without data.
        from compress.runs.whole.into_file import round_into_file

        round_into_file(session, part, lambda: _model(session, journal, index, made))
        _remove_read(session, index)
        return _rounded(plan, part, part.spent_so_far()), None
    units = stream.units(plan)
    finished = [name for unit, _, names in units if unit in part.units for name in names]
    earlier = [entry[0] for name in finished for entry in plan.tensors[name]]
    writer = _writer(part, _folder(session, planned), planned)
    if not {unit for unit, _, _ in units} <= part.units.keys():
        work = _context(session, part, writer, _model(session, journal, index, made))
        if plan.needs_calibration:
            # Imported here, because a run without calibration never loads transformers.
            from compress.passes.quantize.calibrated import calibrate

            calibrate(work, session.output.partial)
        else:
            stream.run(work)
    written = _finish(session, planned, writer, earlier)
    if written is not None:
        part.record(journals.WHOLE, {"sha256": written.sha256()})
    _remove_read(session, index)
    return _rounded(plan, part, part.spent_so_far()), written


def _rounded(plan: Plan, part: PassJournal, spent: Spent) -> StageRecord:
    """The record of the pass that rounds."""
    return StageRecord(plan.rounding.label, **asdict(spent), layers=layers_of(plan, part.units))


def _writer(part: PassJournal, folder: Path, planned: PassPlan) -> ShardWriter:
    """The writer of a pass's weight files: new files, or those that an earlier process began."""
    if not folder.is_dir():
        with disk.refusing(f"make {folder}"):
            disk.mkdir(folder)
            disk.fsync_path(folder.parent)
    # Files that recorded units have written to are never created again: their tensors would read
    # as zeros.
    open_shards = ShardWriter.reopen if part.has_written else ShardWriter.create
    writer = open_shards(folder, planned.layout)
    if journals.START not in part.units:
        part.record(journals.START, {})
    return writer


def _context(
    session: Session, part: PassJournal, writer: ShardWriter, model: Weights
) -> PassContext:
    return PassContext(
        *(session.plan, model.checkpoint, model, writer, part),
        *(session.progress, session.dtype, session.device),
        kept=session.kept,
    )


def _model(session: Session, journal: Journal, index: int, made: Checkpoint | None) -> Weights:
    """The model that pass `index` reads: the source, or what the pass before it wrote.

    made: that checkpoint, where this process hashed it; else it is held to the journal's hash.
    OutputError when that checkpoint was changed since.
    """
    if index == 0:
        return session.weights
    planned = session.plan.passes[index - 1]
    if made is not None:
        return open_weights(made, planned.result.spec)
    folder = _folder(session, planned)
    checkpoint = Checkpoint.open(folder).sealed()
    if checkpoint.sha256() != journal.passes[planned.name].units[journals.WHOLE]["sha256"]:
        raise OutputError(
            f"{folder} was changed while the run was stopped; remove {session.output.partial} and"
            " start again"
        )
    return open_weights(checkpoint, planned.result.spec)


def _settled(
    session: Session, journal: Journal, made: Checkpoint | None
) -> tuple[Session, StageRecord | None]:
    """The session with the schemes that the targets choose for the model that the edits leave.

    Also returns a record of the measurement; None where it was known. The journal has what was
    chosen by, so a resumed run chooses the same, whatever became of the cache. OutputError where
    the disk has no room for the chosen schemes.
    """
    plan, stage = session.plan, None
    name, folder = plan.rounding.name, session.output.partial
    found = measuring.recorded(journal.begin(name))
    if found is None:
        found = measuring.cached(plan, session.checkpoint, session.device)
        if found is None:
            model = _model(session, journal, len(plan.edits), made)
            found, stage = measuring.measure_layers(
                plan, model, session.checkpoint, session.device, session.progress
            )
        # Begun anew: measuring has a record of its own, and is no time of the pass that rounds.
        measuring.record(found, journal.begin(name))
    plan = measuring.chosen_by(found, plan, session.dtype)
    require_space(plan, folder, session.dtype)
    tight = space_warnings(plan, folder, session.dtype)
    return replace(session, plan=replace(plan, warnings=(*plan.warnings, *tight))), stage


def _remove_read(session: Session, index: int) -> None:
    """Remove the checkpoints that pass `index`, now finished, has read and none behind it reads."""
    passes = session.plan.passes
    for earlier in models_read(passes, index) - models_needed(passes, index + 1):
        folder = _folder(session, passes[earlier])
        if folder.exists():
            disk.remove_tree(folder)


def _folder(session: Session, planned: PassPlan) -> Path:
    """Where a pass writes its checkpoint."""
    partial = session.output.partial
    return partial if planned.name == session.plan.passes[-1].name else partial / planned.name
