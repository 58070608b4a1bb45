"""The result that is one file: rounded, written, proved, and what lies beside it."""

from collections.abc import Callable, Iterator
from dataclasses import asdict

from compress.artifacts.report import Made, row
from compress.events import by_tenths, note
from compress.formats import Weights
from compress.passes import journal as journals
from compress.passes.into_file import FilePass, round_model
from compress.passes.journal import PROVED, WRITTEN, Journal, PassJournal
from compress.plan.plan import Plan
from compress.plan.whole.file import file_plan, whole_stage
from compress.report.schema import Export
from compress.runs.finish import finish_beside
from compress.runs.session import Session
from compress_exporters.exporter import Proof, Written
from compress_exporters.gguf.target import PlannedGguf
from compress_exporters.gguf.write import FILE

STAGE = "write"


def round_into_file(session: Session, part: PassJournal, model: Callable[[], Weights]) -> None:
    """Carry out what the journal does not have as done. model: what is rounded."""
    plan, partial = session.plan, session.output.partial
    stage = whole_stage(plan.recipe)
    assert stage is not None, "the plan is of one file"
    if journals.START not in part.units:
        part.record(journals.START, {})
    if not {WRITTEN, PROVED} <= part.units.keys():
        weights = model()
        found = file_plan(weights, stage, session.checkpoint.path)
        planned = PlannedGguf(found)
        if WRITTEN not in part.units:
            work = FilePass(
                *(plan, weights, found.to_round, part, partial),
                *(session.progress, session.dtype, session.device, session.kept),
            )
            written = _write(session, planned.with_rows(round_model(work)))
            part.record(WRITTEN, {"notes": written.notes})
        session.progress(note("prove", "the file is read by others and compared"))
        part.record(PROVED, asdict(planned.verify(partial)))
    finish_beside(plan, partial, session.checkpoint)


def _write(session: Session, planned: PlannedGguf) -> Written:
    partial = session.output.partial
    count = by_tenths(session.progress, STAGE, "tenth of the file")
    written = planned.write_alone(partial, lambda name, done, total: count(done, total))
    size = (partial / FILE).stat().st_size
    assert size == session.plan.shards.total_bytes, f"{size} bytes are not what was planned"
    return written


def file_rows(plan: Plan, journal: Journal) -> Iterator[Export]:
    """How the file was proved, as a report has it of what is made for other runtimes."""
    units = journal.passes[plan.rounding.name].units
    notes = tuple(x for x in units[WRITTEN]["notes"] if x not in plan.notes)
    held = units[PROVED]
    proof = Proof(held["level"], held["max_logit_error"], tuple(held["detail"]))
    made = Made(Written((FILE,), notes), plan.shards.total_bytes, proof)
    yield row("gguf", FILE, made)
