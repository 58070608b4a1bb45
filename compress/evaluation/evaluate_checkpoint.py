"""`compress-model eval`: the quality of any checkpoint we can read, alone or against its source."""

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml

from compress.checkpoint import Checkpoint, resolve_model, write_atomic
from compress.checkpoint.output.report_folder import report_folder
from compress.errors import DataError
from compress.evaluation.compared import Compared
from compress.evaluation.quality import Measured, measure
from compress.evaluation.workspace import Workspace
from compress.events import Progress, silent
from compress.formats import open_weights
from compress.inspect.facts import result_of, source_of
from compress.machine.device import Device, settle
from compress.machine.environment import (
    machine,
    peak_gpu_bytes,
    peak_rss_bytes,
    versions,
)
from compress.machine.other_work import read_processor, share_since
from compress.plan.cache_scales import cache_of
from compress.recipe.evaluation_config import EvaluationConfig, SampleConfig, TextConfig
from compress.recipe.reading.tasks import read_task_options
from compress.recipe.task_config import TaskConfig
from compress.report.codec import write_json
from compress.report.html import write_html
from compress.report.schema import RecipeInfo, Report, StageRecord
from compress.sharing.share import ready
from compress.sharing.trackers import Hook
from compress.usercache.cache import taken, user_cache

if TYPE_CHECKING:
    from compress_kernels.panels import Math


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """What a checkpoint is measured on, and how.

    texts: files, or "self" for text of the source model's own. tasks: files, or mappings as in a
    recipe, '{path: gsm8k.jsonl, max_tokens: 128}'. window, stride: as in a recipe. max_documents,
    max_tokens: of each text, as in a recipe; of text of the model's own a document is a row.
    max_items: of each task that does not say how many. prompts: to be continued. dtype: arithmetic
    of the models, "fp32" or "bf16". math: of the engine, whose cost on the texts is measured too.
    device, track, cache: as in RunOptions.
    """

    texts: Sequence[str] = ()
    tasks: Sequence[str] = ()
    window: int | None = None
    stride: int | None = None
    max_documents: int | None = None
    max_tokens: int | None = None
    max_items: int | None = None
    prompts: Sequence[str] = ()
    dtype: Literal["fp32", "bf16"] = "fp32"
    math: Literal["int16", "int8"] | None = None
    device: str = "auto"
    track: Sequence[str | Hook] = ()
    cache: bool | Path = True


def evaluate_checkpoint(
    checkpoint: str | Path,
    asked: EvaluationOptions,
    *,
    against: str | Path | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Measure a checkpoint on texts and tasks.

    against: its source, for perplexity before, KL and agreement. out: a new or empty folder for
    report.json and report.html. Raises a CompressError for what the user can mend.
    """
    started = datetime.now(UTC)
    share, place = ready(None, asked.track, progress), settle(asked.device)
    if not asked.texts and not asked.tasks:
        raise DataError("there is nothing to measure on: give a text or a task")
    if asked.math is not None and not asked.texts:
        raise DataError(f"math {asked.math} is measured on texts, and there is none: give one")
    tasks = read_task_options(asked.tasks, asked.max_items)
    with report_folder(out) as folder:
        opened = Checkpoint.open(resolve_model(checkpoint))
        # The report has the sha256 of what the result is measured against, or else of itself.
        result = open_weights(opened if against is not None else opened.sealed())
        source = None
        if against is not None:
            source = open_weights(Checkpoint.open(resolve_model(against)).sealed())
        config = _config(asked, tasks, result.spec.context)
        clock, processor = time.perf_counter(), read_processor()
        sides = Compared(result, source)
        work = Workspace(Path(), place.name, progress or silent, kept=user_cache(asked.cache))
        measured = _measured(sides, config, asked.math, work)
        settle(asked.device, progress)  # said once nothing stood against the work
        sides.origin.checkpoint.require_unchanged()
        seconds = time.perf_counter() - clock
        others, gpu = share_since(processor), peak_gpu_bytes(place.name)
        stage = StageRecord("evaluate", seconds, peak_rss_bytes(), gpu, others=others)
        report = _report(asked, sides, stage, measured, started, place)
        report = replace(report, notes=taken(work.kept))
        if folder is not None:
            write_json(report, folder / "report.json", write_atomic)
            write_html(report, folder / "report.html", write_atomic)
    share.report(report, None if out is None else Path(out))
    return report


def _measured(
    sides: Compared,
    config: EvaluationConfig,
    math: "Math | None",
    work: Workspace,
) -> Measured:
    """All texts and tasks or none: DataError where a run would leave one out. RequestError for a
    math that the result has no products for. work: in a folder that is made for it here."""
    if math is not None:
        from compress.evaluation.stream import DTYPES
        from compress.runtime.loading.math import settled_math

        settled_math(sides.result, math, DTYPES[config.dtype], work.device)
    scratch = Path(tempfile.mkdtemp(prefix="compress-model-"))
    place = replace(work, folder=scratch / "evaluation")
    try:
        return measure(sides, config, place, all_or_none=True, math=math)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _report(
    asked: EvaluationOptions,
    sides: Compared,
    stage: StageRecord,
    measured: Measured,
    started: datetime,
    place: Device,
) -> Report:
    asked_of = {"texts": list(asked.texts), "tasks": list(asked.tasks), "math": asked.math}
    given = {name: value for name, value in asked_of.items() if value or name == "texts"}
    origin = sides.origin
    return Report(
        tool="compress-model",
        versions=versions(),
        recipe=RecipeInfo("", yaml.safe_dump(given)),
        seed=0,
        source=source_of(
            origin.checkpoint, origin.spec, origin.checkpoint.sha256(), cache_of(origin)
        ),
        result=result_of(sides.result),
        stages=(stage,),
        machine=machine(place.name),
        started=started.isoformat(timespec="seconds"),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        command="eval",
        quality=measured.quality,
        samples=measured.samples,
        samples_reason=measured.samples_reason,
        warnings=place.warnings,
        two_models=origin.checkpoint.named.resolve() != sides.result.checkpoint.named.resolve(),
    )


def _config(
    asked: EvaluationOptions, tasks: tuple[TaskConfig, ...], context: int
) -> EvaluationConfig:
    """The same as a recipe would say it. context: of the model, in tokens; 0 where unknown."""
    return EvaluationConfig(
        texts=_texts(asked, context),
        tasks=tasks,
        window=asked.window,
        stride=asked.stride,
        dtype=asked.dtype,
        samples=SampleConfig(prompts=tuple(asked.prompts)),
    )


def _texts(asked: EvaluationOptions, context: int) -> tuple[TextConfig, ...]:
    """Files go by their stems, with the folder in front where two have the same; text of the
    model's own is no longer than its context."""
    stems = [Path(text).stem for text in asked.texts if text != "self"]
    documents, tokens = asked.max_documents, asked.max_tokens

    def config(text: str) -> TextConfig:
        if text == "self":
            own = TextConfig("self", kind="self", max_documents=documents, max_tokens=tokens)
            return replace(own, length=min(own.length, context or own.length))
        name = Path(text).stem
        if stems.count(name) > 1:
            name = f"{Path(text).absolute().parent.name}/{name}"
        return TextConfig(name, path=text, max_documents=documents, max_tokens=tokens)

    return tuple(config(text) for text in asked.texts)
