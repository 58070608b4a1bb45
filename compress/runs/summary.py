"""Put what a run did into a Report, and the report into OUT/report/."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compress.arch.spec import DecoderSpec
from compress.artifacts.report import PACKAGES
from compress.checkpoint import disk, write_atomic
from compress.checkpoint.shards.dtype_codes import itemsize
from compress.checkpoint.ties import shares_bytes
from compress.evaluation.quality import Measured
from compress.formats.runtimes.snippets import all_lines, why_not_opened
from compress.inspect.facts import architecture_of, source_of
from compress.machine.environment import machine, slow_kernels, versions
from compress.passes import outliers
from compress.passes.journal import CALIBRATION, Journal, layer_of
from compress.plan.budget import BudgetChoice as Chosen
from compress.plan.passes import ROUNDING
from compress.plan.plan import Plan
from compress.report.codec import write_json
from compress.report.html import write_html
from compress.report.schema import (
    Budget,
    Layer,
    Planned,
    PlanVsActual,
    RecipeInfo,
    Report,
    Result,
    SizePart,
    StageRecord,
)
from compress.report.summary import worse_than_plain
from compress.runs.session import Session

FOLDER = "report"
RESUMED = (
    "the run was stopped and resumed: its time is that of all recorded units, without the work"
    " that was lost"
)


def build_report(
    session: Session,
    stages: Sequence[StageRecord],
    journal: Journal,
    measured: Measured,
    started: datetime,
) -> Report:
    """Everything the run can say about itself."""
    plan, checkpoint = session.plan, session.checkpoint
    labels = {planned.label for planned in plan.passes}
    seconds = sum(stage.seconds for stage in stages if stage.name in labels)
    layers = tuple(layer for stage in stages for layer in stage.layers)
    report = Report(
        tool="compress-model",
        versions=versions(PACKAGES if plan.recipe.export else ()),
        recipe=RecipeInfo(plan.recipe.name, plan.recipe.text, plan.recipe.overrides),
        seed=plan.recipe.seed,
        source=source_of(checkpoint, plan.source.spec, session.sha256, plan.caches[0]),
        result=result_of(session, layers),
        stages=tuple(stages),
        machine=machine(session.device),
        started=started.isoformat(timespec="seconds"),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        calibration=_calibration(journal, stages),
        quality=measured.quality,
        samples=measured.samples,
        samples_reason=measured.samples_reason,
        plan_vs_actual=PlanVsActual(
            bytes=Planned(plan.shards.total_bytes, _stored_bytes(session)),
            bytes_range=plan.bytes_range,
            seconds=Planned(plan.estimate.seconds, seconds),
            peak_rss=Planned(
                plan.estimate.peak_rss_bytes, max(stage.peak_rss_bytes for stage in stages)
            ),
        ),
        warnings=(
            *plan.warnings,
            *session.shared,
            *session.passed_over,
            *slow_kernels(session.device),
            *measured.left_out,
            *([RESUMED] if journal.resumed else []),
            *(f"left behind: {name}" for name in checkpoint.skipped_files if " (" in name),
        ),
        copied_tensors=(*plan.spec.copied, *unrecognised(plan.spec)),
        copied_files=tuple(path.name for path in checkpoint.side_files()),
        skipped_files=tuple(checkpoint.skipped_files),
        open_with=all_lines(plan.format, plan.runtimes, str(session.output.out)),
        open_reason=why_not_opened(plan.format, plan.runtimes, "--set output.format=dense"),
        budget=None if plan.budget is None else _budget(plan.budget, layers),
        loads=session.loads,
        notes=plan.notes,
    )
    return replace(report, warnings=(*report.warnings, *worse_than_plain(report)))


def _budget(chosen: Chosen, layers: Iterable[Layer]) -> Budget:
    """The losses that the choice went by, and the same of the layers as they were written."""
    assert chosen.predicted is not None, "a run measures before it begins"
    lost = sum(chosen.shares.get(x.name, 0.0) * (x.error or 0.0) for x in layers)
    target = " and ".join(chosen.targets)
    return Budget(target, chosen.sensitivity, Planned(chosen.predicted, lost))


def write_report(report: Report, folder: Path) -> None:
    """report/report.json and the page drawn from it."""
    target = folder / FOLDER
    with disk.refusing(f"make {target}"):
        if not target.is_dir():
            disk.mkdir(target)
    write_json(report, target / "report.json", write_atomic)
    write_html(report, target / "report.html", write_atomic)


def _calibration(journal: Journal, stages: Sequence[StageRecord]) -> dict[str, Any] | None:
    """What was calibrated on, and how often it went through a block."""
    rounding = journal.passes.get(ROUNDING)
    if rounding is None or CALIBRATION not in rounding.units:
        return None
    summary = rounding.units[CALIBRATION]
    passes = [layer.passes for stage in stages for layer in stage.layers if layer.passes]
    return {**summary, "passes_per_block": max(passes, default=0)}


def layers_of(plan: Plan, units: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Records of all linears: the quantized ones from the journal's units, the others with the
    reason."""
    listed = (records for records in units.values() if isinstance(records, list))
    done = [layer_of(record) for records in listed for record in records]
    return (*done, *_skipped(plan))


def _skipped(plan: Plan) -> Iterable[Layer]:
    for skipped in plan.skipped:
        n, k = skipped.linear.shape
        own = skipped.linear.tensor  # scales of a cache go with a layer's tensor, quantized or not
        entries = plan.tensors[own]
        dtype = next((dtype for name, dtype, _ in entries if name == own), entries[0][1])
        size = n * k * itemsize(dtype)
        yield Layer(
            name=skipped.linear.name,
            scheme=dtype.lower(),
            method="none",
            bits_per_weight=8 * itemsize(dtype),
            bytes_before=size,
            bytes_after=size,
            skipped_reason=skipped.reason,
            block=skipped.block,
            role=skipped.linear.role,
            expert=skipped.linear.expert,
        )


def result_of(session: Session, layers: Sequence[Layer]) -> Result:
    """What came out. layers: of all linears."""
    plan, cache = session.plan, session.plan.caches[1]
    weights = sum(m.linear.shape[0] * m.linear.shape[1] for m in plan.compressed)
    stored = sum(layer.bytes_after for layer in layers if layer.skipped_reason is None)
    return Result(
        path=str(session.output.out),
        params=sum(info.numel for info in plan.rounded.tensors.values()),
        bytes=_stored_bytes(session),
        bits_per_weight=8 * stored / weights if weights else plan.bits_per_weight,
        kv_bytes_per_token=cache.token or None,
        context=cache.tokens or None,
        kv_bytes_of_context=cache.context,
        format=plan.format,
        architecture=architecture_of(plan.spec),
        dtype=plan.rounded.main_dtype,
        sizes=tuple(_sizes(session)),
    )


def unrecognised(spec: DecoderSpec) -> tuple[str, ...]:
    """Block tensors that no architecture table names."""
    return tuple(name for block in spec.blocks for name in block.unrecognised)


def _stored_bytes(session: Session) -> int:
    """Size of the weight files as the disk has them, that of outlier columns included."""
    folder = session.output.partial
    shards = sum((folder / file.name).stat().st_size for file in session.plan.shards.files)
    return shards + outliers.side_bytes(folder)


def _sizes(session: Session) -> Iterable[SizePart]:
    """Parts that add up to the weight files before and after."""
    plan, checkpoint = session.plan, session.checkpoint
    side_bytes = outliers.side_bytes(session.output.partial)
    quantized = {m.linear.tensor for m in plan.compressed}
    large = {plan.spec.embedding, plan.spec.head, plan.source.spec.head}
    linears = {x.tensor for spec in (plan.source.spec, plan.spec) for x in spec.linears()}

    def kind(name: str) -> str:
        if name in quantized:
            return "quantized weights"
        if name in linears:
            return "dense linears"
        return "embeddings" if name in large else "norms and other"

    kinds = ("quantized weights", "scales", "dense linears", "embeddings", "norms and other")
    before = dict.fromkeys(kinds, 0)
    after = dict(before)
    # A head that a stage unties has no bytes of its own in the source.
    once = plan.source.spec.head if shares_bytes(checkpoint.tensors, plan.source.spec) else None
    for name, info in checkpoint.tensors.items():
        before[kind(name)] += 0 if name == once else info.nbytes
    counted: set[str] = set()  # experts of a block are one tensor of a GGUF file
    for source, stored in plan.tensors.items():
        for position, (name, _, _) in enumerate(stored):
            # The codes come first in every format; what follows serves to read them.
            scales = plan.file is None and source in quantized and position
            after["scales" if scales else kind(source)] += (
                0 if name in counted else plan.shards.tensors[name].nbytes
            )
            counted.add(name)
    if not before["dense linears"] and not after["dense linears"]:
        del before["dense linears"], after["dense linears"]
    if side_bytes:
        before["outlier columns"], after["outlier columns"] = 0, side_bytes
    before["file headers"] = checkpoint.file_bytes - sum(before.values())
    after["file headers"] = _stored_bytes(session) - sum(after.values())
    return [SizePart(name, before[name], after[name]) for name in before]
