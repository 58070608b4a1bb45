"""What `compress-model roofline` and `bench` share: where it runs, on which texts, the report."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from compress.checkpoint import Checkpoint, resolve_model, write_atomic
from compress.errors import RequestError
from compress.events import Progress, note
from compress.formats import Weights, open_weights
from compress.inspect.facts import result_of, source_of
from compress.machine.device import settle
from compress.machine.environment import (
    compute_dtype,
    cpu_name,
    machine,
    peak_gpu_bytes,
    peak_rss_bytes,
    versions,
)
from compress.machine.other_work import ProcessorReading, share_since
from compress.plan.cache_scales import cache_of
from compress.report.codec import write_json
from compress.report.disturbance import disturbance
from compress.report.html import write_html
from compress.report.schema import RecipeInfo, Report, StageRecord
from compress.runtime.forms.form import Arithmetic
from compress.runtime.loading.math import settled_math
from compress.runtime.loading.open_engine import UNKNOWN_CONTEXT
from compress.runtime.loading.room import settled_arithmetic
from compress.runtime.sequences.limits import check_whole
from compress.serve.open_model import stored_dtype
from compress.speed.forecast import LoadShape, forecast
from compress.speed.rates import Calibrated, calibrate
from compress.speed.roofline import Hardware
from compress.speed.timer import Timer, measure_machine
from compress_kernels.panels import Math

BATCHES, PROMPT, OUTPUT = (1, 8, 64), 128, 64
# Threads that any machine may be asked for: 100,000 of them end the process (SIGSEGV in OpenMP).
FEW_CORES = 64
Dtype = Literal["fp32", "bf16", "fp16"]
KvDtype = Literal["fp32", "bf16", "fp16", "int8"]


@dataclass(frozen=True, slots=True)
class SpeedSetting:
    """Where the engine computes. threads: None for torch's own number. kv_dtype: in which keys and
    values are stored, None for `dtype`. math: of products with codes, None for int16 where they can
    have it.

    RequestError for threads that are none, or more than could be of use.
    """

    device: str = "auto"
    dtype: Dtype = "fp32"
    threads: int | None = None
    kv_dtype: KvDtype | None = None
    math: Math | None = None

    def __post_init__(self) -> None:
        most = max(FEW_CORES, os.cpu_count() or 1)
        if self.threads is not None:
            check_whole("threads", self.threads, 1)
        if self.threads is not None and self.threads > most:
            raise RequestError(
                f"threads is {self.threads}: this machine has {os.cpu_count()} cores; give"
                f" {most} or fewer"
            )

    @property
    def arithmetic(self) -> torch.dtype:
        return compute_dtype("", self.device, self.dtype)

    @property
    def stored(self) -> torch.dtype:
        """Of keys and values. RequestError for a name that is none."""
        return stored_dtype(self.kv_dtype) or self.arithmetic


@dataclass(frozen=True, slots=True)
class SpeedTexts:
    """The texts that a speed is asked for. batches: of them at once, None for 1, 8 and 64. prompt,
    output: tokens of one, None for 128 and 64 or what the model reads."""

    batches: Sequence[int] | None = None
    prompt: int | None = None
    output: int | None = None


def math_of(weights: Weights, place: SpeedSetting) -> Math:
    """RequestError for a math that none of the products can have."""
    return settled_math(weights, place.math, place.arithmetic, place.device)


def begin(asked: SpeedSetting) -> tuple[SpeedSetting, datetime]:
    """The setting with its device, and now. OutputError for a device that will not do."""
    return replace(asked, device=settle(asked.device).name), datetime.now(UTC)


def open_checkpoint(checkpoint: str | Path, *, sealed: bool) -> Weights:
    """checkpoint: a folder or a hub id. sealed: a report will have its sha256, so that it is hashed
    before it is read, and a change is a CheckpointError."""
    opened = Checkpoint.open(resolve_model(checkpoint))
    return open_weights(opened.sealed() if sealed else opened)


@contextmanager
def threads(place: SpeedSetting) -> Iterator[None]:
    """With its number of threads; torch's own comes back."""
    before = torch.get_num_threads()
    torch.set_num_threads(place.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def asked_of(weights: Weights, texts: SpeedTexts) -> LoadShape:
    """RequestError for numbers below 1, and for texts that are longer than the model reads."""
    context = weights.spec.context or UNKNOWN_CONTEXT
    batches, prompt, output = texts.batches or BATCHES, texts.prompt, texts.output
    for name, values in (("batch", batches), ("prompt", [prompt]), ("output", [output])):
        for value in values:
            if value is not None:
                check_whole(name, value, 1)
    given = prompt or min(PROMPT, max(1, context - (output or context // 2)))
    made = output or min(OUTPUT, max(1, context - given))
    if given + made > context:
        raise RequestError(
            f"prompt {given} and output {made} are {given + made} tokens: the model reads {context}"
        )
    return LoadShape(tuple(dict.fromkeys(batches)), given, made)


def begin_facts(
    place: SpeedSetting, asked: LoadShape, progress: Progress
) -> tuple[dict[str, Any], Hardware]:
    """The machine and the texts of a report on speed, and the machine for predictions."""
    progress(note("calibrate", "bandwidth and operations of this machine"))
    device = torch.device(place.device)
    found = measure_machine(place.arithmetic, Timer(device))
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    facts = {
        "processor": gpu or cpu_name(),
        "device": place.device,
        "dtype": place.dtype,
        "kv_dtype": place.kv_dtype or place.dtype,
        "threads": torch.get_num_threads(),
        "gigabytes_per_second": float(f"{found.bandwidth / 1e9:.4g}"),
        "gigaflops_per_second": float(f"{found.flops / 1e9:.4g}"),
        "free_bytes": found.free_bytes,
    }
    texts = {"prompt": asked.prompt, "output": asked.output}
    return {"machine": facts, "texts": texts}, found


def predicted(
    weights: Weights, asked: LoadShape, place: SpeedSetting, here: Hardware, progress: Progress
) -> tuple[dict[str, Any], Calibrated]:
    """A checkpoint in a report on speed. CheckpointError for a decoder in no table of forwards."""
    progress(note("calibrate", f"the engine's operations on {weights.checkpoint.named}"))
    math = math_of(weights, place)
    how = Arithmetic.here(place.arithmetic, place.device, math)
    found = calibrate(
        weights,
        how=settled_arithmetic(weights, how),
        kv_dtype=place.stored,
        machine=here,
        length=asked.length,
    )
    context = weights.spec.context or UNKNOWN_CONTEXT
    return {"path": path_of(weights), "math": math, **forecast(found, asked, context)}, found


def add_disturbance(facts: dict[str, Any], before: ProcessorReading | None) -> None:
    """What other programs took since `before`: a share of the processors, None where the system
    does not say, and a line where that disturbed what was measured."""
    share = share_since(before)
    facts["others"] = None if share is None else round(share, 3)
    disturbed = disturbance(share)
    if disturbed is not None:
        facts["disturbed"] = disturbed


def path_of(weights: Weights) -> str:
    """The checkpoint's folder, or GGUF file, in full."""
    return str(weights.checkpoint.named.resolve())


def speed_report(
    command: str,
    facts: dict[str, Any],
    result: Weights,
    source: Weights,
    place: SpeedSetting,
    started: datetime,
) -> Report:
    """A report with the facts as its speed. source: sealed; the result itself where nothing else is
    known. CheckpointError where it changed meanwhile."""
    source.checkpoint.require_unchanged()
    now = datetime.now(UTC)
    seconds = (now - started).total_seconds()
    peaks = peak_rss_bytes(), peak_gpu_bytes(place.device)
    stage = StageRecord(command, seconds, *peaks, others=facts["others"])
    return Report(
        tool="compress-model",
        versions=versions(),
        recipe=RecipeInfo("", yaml.safe_dump(asdict(place))),
        seed=0,
        source=source_of(
            source.checkpoint, source.spec, source.checkpoint.sha256(), cache_of(source)
        ),
        result=result_of(result),
        stages=(stage,),
        machine=machine(place.device),
        started=started.isoformat(timespec="seconds"),
        finished=now.isoformat(timespec="seconds"),
        command=command,
        samples_reason="speed was looked at, not text",
        speed=facts,
    )


def write_report(report: Report, folder: Path) -> None:
    """report.json and report.html."""
    write_json(report, folder / "report.json", write_atomic)
    write_html(report, folder / "report.html", write_atomic)
