"""From a checkpoint, dense or quantized, to an artifact of another runtime, proved before it is
there."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from compress.artifacts import in_place
from compress.artifacts.report import ArtifactReport, as_json, build, write
from compress.checkpoint import Checkpoint, resolve_model
from compress.checkpoint.output.publishing import prepare, published
from compress.checkpoint.regular import usable
from compress.checkpoint.ties import settled
from compress.errors import OutputError, RecipeError
from compress.events import Progress, by_tenths, note, silent
from compress.formats import open_weights
from compress_exporters.exporter import Exporter, InPlace, Options, PlannedExport, Source, Written
from compress_exporters.table import EXPORTERS

STAGE = "export"


@dataclass(frozen=True, slots=True, eq=False)
class ArtifactPlan:
    """What an export would write: `planned`, by the target `exporter` of `source`."""

    source: Source
    exporter: Exporter
    options: Options
    planned: PlannedExport

    @property
    def beside(self) -> InPlace | None:
        """How it goes beside the source's weights, if it does."""
        return self.exporter.in_place if self.options.in_place else None


def is_target(to: str) -> bool:
    """Whether `--to` names an artifact and not a format of checkpoints."""
    return target_name(to) in EXPORTERS


def target_name(to: str) -> str:
    return to.strip().lower().replace("_", "-")


def plan_artifact(
    model: str | Path, to: str, options: Options, out: str | Path | None = None
) -> ArtifactPlan:
    """CheckpointError or RecipeError for what the target `to` (a key of EXPORTERS) cannot say, and
    for a folder `out` where the artifact goes beside the weights."""
    exporter = EXPORTERS[target_name(to)]
    if options.max_context is not None and options.max_context < 1:
        raise RecipeError(f"--max-context is {options.max_context}; it is 1 position or more")
    if options.in_place:
        _require_in_place(exporter, out)
    weights = open_weights(Checkpoint.open(resolve_model(model)))
    source = replace(weights, checkpoint=settled(weights.checkpoint, weights.spec))
    return ArtifactPlan(source, exporter, options, exporter.plan(source, options))


def _require_in_place(exporter: Exporter, out: str | Path | None) -> None:
    if exporter.in_place is None:
        those = ", ".join(name for name, row in EXPORTERS.items() if row.in_place is not None)
        raise RecipeError(f"--in-place is for {those}, and --to is {exporter.name}; leave it out")
    if out is not None:
        raise RecipeError(f"--in-place goes into the checkpoint's own folder, and --out is {out}")


def dry_artifact(
    model: str | Path,
    to: str,
    out: str | Path | None = None,
    *,
    options: Options | None = None,
    overwrite: bool = False,
) -> ArtifactReport:
    """The report of an export that is not done; refuses all that an export into `out` would."""
    plan = plan_artifact(model, to, options or Options(), out)
    planned = plan.planned
    where = None if out is None else usable(out, "out", OutputError).absolute()
    if plan.beside is not None:
        where = _place(plan, plan.beside, overwrite=overwrite).folder
    elif out is not None:
        prepare(out, plan.source.checkpoint.path, planned.size, overwrite=overwrite)
    return build(
        plan.source,
        plan.exporter.name,
        where,
        notes=planned.notes,
        size=planned.size,
        linked=planned.linked,
    )


def export_artifact(
    model: str | Path,
    to: str,
    out: str | Path | None = None,
    *,
    options: Options | None = None,
    verify: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ArtifactReport:
    """Write the checkpoint `model` for the target `to` (a key of EXPORTERS) into `out`.

    out: None where the options say that it goes beside the weights. verify: prove it before it
    appears. Raises a CompressError for whatever the user can mend.
    """
    plan = plan_artifact(model, to, options or Options(), out)
    work = partial(_work, plan, verify=verify, progress=progress or silent)
    if plan.beside is not None:
        return _added(_place(plan, plan.beside, overwrite=overwrite), work)
    if out is None:
        raise OutputError("the artifact has no folder; give `out`, or Options(in_place=True)")
    output = prepare(out, plan.source.checkpoint.path, plan.planned.size, overwrite=overwrite)

    def whole() -> ArtifactReport:
        report = work(output.partial, output.out, lambda _: output.partial)
        write(report, output.partial)
        return report

    return published(output, whole)


def _place(plan: ArtifactPlan, how: InPlace, *, overwrite: bool) -> in_place.InPlaceFolder:
    return in_place.prepare(how, plan.source.checkpoint, plan.planned.size, overwrite=overwrite)


def _added(place: in_place.InPlaceFolder, work: Callable[..., ArtifactReport]) -> ArtifactReport:
    def moved(written: Written) -> Path:
        in_place.move_into_place(place, written.files)
        return place.folder

    def whole() -> tuple[ArtifactReport, bytes]:
        report = work(place.work, place.folder, moved)
        return report, as_json(report)

    return in_place.added(place, whole)


def _work(
    plan: ArtifactPlan,
    folder: Path,
    out: Path,
    move: Callable[[Written], Path],
    *,
    verify: bool,
    progress: Progress,
) -> ArtifactReport:
    """Fills a folder; `move` tells where what was written is proved. out: where it will be."""
    began, exporter, planned = time.perf_counter(), plan.exporter, plan.planned
    count = by_tenths(progress, STAGE, "tenth of the weights")
    written = planned.write(folder, lambda name, done, total: count(done, total))
    size = sum((folder / name).stat().st_size for name in written.files)
    proved_in = move(written)
    seconds, proof = {"write": time.perf_counter() - began}, None
    if verify:
        progress(note(STAGE, f"proving {exporter.name} against the weights"))
        began = time.perf_counter()
        proof = planned.verify(proved_in)
        seconds["verify"] = time.perf_counter() - began
    return build(
        plan.source,
        exporter.name,
        out,
        notes=(*planned.notes, *(x for x in written.notes if x not in planned.notes)),
        size=size,
        linked=planned.linked,
        written=written,
        proof=proof,
        seconds=seconds,
    )
