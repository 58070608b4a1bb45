"""What the compression cost: perplexity, KL, agreement and samples, as the recipe asks."""

import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.errors import DataError, DependencyError
from compress.evaluation.config import DEFAULT_WINDOW_CAP, EvaluationConfig
from compress.formats import Weights, open_weights
from compress.pipeline.events import Event, Progress, by_tenths, note, silent
from compress.pipeline.vocabulary import refuse_other_tokenizer
from compress.report.schema import Quality, Sample, TextQuality
from compress_calibration.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from compress.evaluation.windows import TokenWindows

LEFT_OUT = " was left out"
NOT_ASKED = "the recipe asks for no evaluation"


@dataclass(frozen=True, slots=True)
class Measured:
    """Quality as the report takes it; `samples_reason` says why there are no samples, `left_out`
    why texts are missing."""

    quality: Quality | None
    samples: tuple[Sample, ...]
    samples_reason: str | None
    left_out: tuple[str, ...] = ()


def measure(
    result_folder: Path,
    source: Weights | None,
    config: EvaluationConfig | None,
    progress: Progress,
    *,
    work_folder: Path,
    device: str = "cpu",
) -> Measured:
    """Evaluate the checkpoint in `result_folder`, against its source where there is one.

    work_folder: made for temporary files and removed again. A text that cannot be had (no memory
    to sample it, a file that is gone) is left out: the result is worth more than the measurement.
    """
    if config is None:
        return Measured(None, (), NOT_ASKED)
    # Late: a data-free run without evaluation never loads transformers.
    from compress.evaluation.evaluate import evaluate
    from compress.evaluation.samples import sample_pairs
    from compress.evaluation.stream import Work

    result = open_weights(Checkpoint.open(result_folder))
    tokenizer = _tokenizer(result_folder, config)
    if source is not None and tokenizer is not None:
        refuse_other_tokenizer(tokenizer, source.checkpoint.path, config.texts)
    began = time.perf_counter()
    windows, left_out = _windows(source or result, config, tokenizer, device, progress)
    _announce(progress, windows, result, config, 1 if source is None else 2, device, began)
    work_folder.mkdir(exist_ok=True)

    def on_block(stage: str, done: int, total: int) -> None:
        progress(Event(stage, f"block {done - 1}", done, total, 0.0))

    try:
        work = Work(work_folder, device, on_block)
        found = evaluate(result, source, windows, config, work) if windows else ()
        samples, reason = sample_pairs(result, source, tokenizer, config.samples, device)
    finally:
        shutil.rmtree(work_folder, ignore_errors=True)
    texts = tuple(TextQuality(**asdict(text)) for text in found)
    return Measured(
        Quality(texts) if texts else None,
        tuple(Sample(s.prompt, s.source or "", s.result) for s in samples),
        reason,
        left_out,
    )


def _announce(
    progress: Progress,
    windows: list["TokenWindows"],
    result: Weights,
    config: EvaluationConfig,
    models: int,
    device: str,
    began: float,
) -> None:
    """How much there is to evaluate; reading and writing it is a step of its own."""
    if not windows:
        return
    from compress.pipeline.evaluation_cost import announcement

    progress(Event("evaluate", "texts read", 1, 1, time.perf_counter() - began))
    progress(note("evaluate", announcement(windows, result.spec, config, models, device)))


def _tokenizer(folder: Path, config: EvaluationConfig) -> Tokenizer | None:
    """The result's tokenizer; None where there is none and only text of the model's own is read."""
    try:
        return load_tokenizer(folder)
    except (DataError, DependencyError):
        if config.samples.prompts or any(text.kind != "self" for text in config.texts):
            raise
        return None


def _windows(
    origin: Weights,
    config: EvaluationConfig,
    tokenizer: Tokenizer | None,
    device: str,
    progress: Progress,
) -> tuple[list["TokenWindows"], tuple[str, ...]]:
    """Windows of every text that can be had, and a line about each one that cannot."""
    from compress.evaluation.texts import read_windows

    def write(count: int, length: int, seed: int) -> Tensor:
        return sampled(origin, count, length, seed, device, progress)

    context = origin.spec.context or DEFAULT_WINDOW_CAP
    windows, left_out = [], []
    for text in config.texts:
        try:
            windows.append(read_windows(text, config, tokenizer, context, write))
        except DataError as error:
            left_out.append(f"evaluation text {text.name!r}{LEFT_OUT}: {error}")
    return windows, tuple(left_out)


def sampled(
    weights: Weights, count: int, length: int, seed: int, device: str, progress: Progress = silent
) -> Tensor:
    """Text of the model's own, in the arithmetic of the evaluation: ids int64 [count, length]."""
    from compress.blocks.sample import generate
    from compress.blocks.skeleton import Skeleton

    skeleton = Skeleton(weights.checkpoint.config, weights.spec, dtype=torch.float32, device=device)
    progress(note("evaluate", f"the model writes {count} rows of {length} tokens"))
    counter = by_tenths(progress, "evaluate", "text written")
    return generate(weights, skeleton, count=count, length=length, seed=seed, progress=counter)
