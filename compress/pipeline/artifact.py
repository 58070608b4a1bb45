"""From a checkpoint, dense or quantized, to an artifact of another runtime, proved before it is
there."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from compress.checkpoint import Checkpoint, Output, resolve_model
from compress.checkpoint.ties import settled
from compress.errors import RecipeError
from compress.formats import open_weights
from compress.pipeline.artifact_report import ArtifactReport, build, write
from compress.pipeline.events import Progress, by_tenths, note, silent
from compress.pipeline.publishing import prepare, published
from compress_exporters.exporter import Exporter, Options, Source
from compress_exporters.table import EXPORTERS

STAGE = "export"


@dataclass(frozen=True, slots=True, eq=False)
class ArtifactPlan:
    """What an export would write. bytes: of its weights, or a few more. notes: what the target
    makes of the source."""

    source: Source
    exporter: Exporter
    options: Options
    bytes: int
    notes: tuple[str, ...]


def is_target(to: str) -> bool:
    """Whether `--to` names an artifact and not a format of checkpoints."""
    return target_name(to) in EXPORTERS


def target_name(to: str) -> str:
    return to.strip().lower().replace("_", "-")


def plan_artifact(model: str | Path, to: str, options: Options) -> ArtifactPlan:
    """CheckpointError or RecipeError for what the target `to` (a key of EXPORTERS) cannot say."""
    exporter = EXPORTERS[target_name(to)]
    if options.max_context is not None and options.max_context < 1:
        raise RecipeError(f"--max-context is {options.max_context}; it is 1 position or more")
    weights = open_weights(Checkpoint.open(resolve_model(model)))
    source = replace(weights, checkpoint=settled(weights.checkpoint, weights.spec))
    notes = exporter.check(source, options)
    return ArtifactPlan(source, exporter, options, exporter.size(source, options), notes)


def dry_artifact(
    model: str | Path,
    to: str,
    out: str | Path | None = None,
    *,
    options: Options | None = None,
    overwrite: bool = False,
) -> ArtifactReport:
    """The report of an export that is not done; refuses all that an export into `out` would."""
    plan = plan_artifact(model, to, options or Options())
    if out is not None:
        prepare(out, plan.source.checkpoint.path, plan.bytes, overwrite=overwrite)
    where = None if out is None else Path(out).absolute()
    return build(plan.source, plan.exporter.name, where, notes=plan.notes, size=plan.bytes)


def export_artifact(
    model: str | Path,
    to: str,
    out: str | Path,
    *,
    options: Options | None = None,
    verify: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ArtifactReport:
    """Write the checkpoint `model` for the target `to` (a key of EXPORTERS) into `out`.

    verify: prove it before it appears. Raises a CompressError for whatever the user can mend.
    """
    plan = plan_artifact(model, to, options or Options())
    output = prepare(out, plan.source.checkpoint.path, plan.bytes, overwrite=overwrite)
    return published(output, lambda: _work(plan, output, verify, progress or silent))


def _work(plan: ArtifactPlan, output: Output, verify: bool, progress: Progress) -> ArtifactReport:
    began, exporter = time.perf_counter(), plan.exporter

    count = by_tenths(progress, STAGE, "tenth of the weights")
    written = exporter.write(
        plan.source, output.partial, plan.options, lambda name, done, total: count(done, total)
    )
    seconds, proof = {"write": time.perf_counter() - began}, None
    if verify:
        progress(note(STAGE, f"proving {exporter.name} against the weights"))
        began = time.perf_counter()
        proof = exporter.verify(plan.source, output.partial, plan.options)
        seconds["verify"] = time.perf_counter() - began
    report = build(
        plan.source,
        exporter.name,
        output.out,
        notes=(*plan.notes, *(x for x in written.notes if x not in plan.notes)),
        size=sum((output.partial / name).stat().st_size for name in written.files),
        written=written,
        proof=proof,
        seconds=seconds,
    )
    write(report, output.partial)
    return report
