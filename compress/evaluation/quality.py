"""What the compression cost: perplexity, KL, agreement and samples, as the recipe asks."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.errors import DataError, DependencyError
from compress.evaluation.task_quality import LEFT_OUT, measure_tasks, read_tasks
from compress.evaluation.vocabulary import refuse_other_tokenizer
from compress.events import Event, Progress, by_tenths, note, silent
from compress.formats import Weights, open_weights
from compress.recipe.evaluation_config import DEFAULT_WINDOW_CAP, EvaluationConfig
from compress.report.schema import Quality, Sample, TextQuality
from compress.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from compress.evaluation.tasks.asked import Task
    from compress.evaluation.windows import TokenWindows

NOT_ASKED = "the recipe asks for no evaluation"


@dataclass(frozen=True, slots=True)
class Measured:
    """Quality as the report takes it; `samples_reason` says why there are no samples, `left_out`
    why texts and tasks are missing."""

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
    all_or_none: bool = False,
) -> Measured:
    """Evaluate the checkpoint in `result_folder`, against its source where there is one.

    work_folder: made for temporary files and removed again. A text or task that cannot be had (no
    memory to sample it, a file that is gone) is left out: the result is worth more than the
    measurement. all_or_none: it raises DataError instead.
    """
    if config is None:
        return Measured(None, (), NOT_ASKED)
    # Late: a data-free run without evaluation never loads transformers.
    from compress.evaluation.samples import sample_pairs

    result = open_weights(Checkpoint.open(result_folder))
    models = [result] if source is None else [source, result]
    tokenizer = _tokenizer(result_folder, config)
    began = time.perf_counter()
    tasks, lacking = read_tasks(config, tokenizer, models)
    if source is not None and tokenizer is not None:
        asked = {task.config.name: task.texts for task in tasks}
        refuse_other_tokenizer(tokenizer, source.checkpoint.small, config.texts, asked)
    windows, left_out = _windows(source or result, config, tokenizer, device, progress)
    left_out = _lacking((*left_out, *lacking), all_or_none)
    _announce(progress, windows, tasks, models, config, device, began)
    done = measure_tasks(tasks, result, source, tokenizer, config, progress, device)
    left_out += _lacking(done.left_out, all_or_none)
    texts = _texts(result, source, windows, config, progress, work_folder, device)
    samples, reason = sample_pairs(result, source, tokenizer, config.samples, device)
    return Measured(
        Quality(texts, dict(done.tasks)) if texts or done.tasks else None,
        tuple(Sample(s.prompt, s.source or "", s.result) for s in samples),
        reason,
        left_out,
    )


def _lacking(lines: tuple[str, ...], all_or_none: bool) -> tuple[str, ...]:
    """What is left out; DataError where nothing may be."""
    if lines and all_or_none:
        raise DataError("; ".join(line.replace(LEFT_OUT, "", 1) for line in lines))
    return lines


def _texts(
    result: Weights,
    source: Weights | None,
    windows: list["TokenWindows"],
    config: EvaluationConfig,
    progress: Progress,
    work_folder: Path,
    device: str,
) -> tuple[TextQuality, ...]:
    """Of texts, block-streamed."""
    if not windows:
        return ()
    from compress.evaluation.stream import Workspace
    from compress.evaluation.text_quality import evaluate

    def on_block(stage: str, done: int, total: int) -> None:
        progress(Event(stage, f"block {done - 1}", done, total, 0.0))

    work_folder.mkdir(exist_ok=True)
    try:
        found = evaluate(result, source, windows, config, Workspace(work_folder, device, on_block))
    finally:
        shutil.rmtree(work_folder, ignore_errors=True)
    return tuple(TextQuality(**asdict(text)) for text in found)


def _announce(
    progress: Progress,
    windows: list["TokenWindows"],
    tasks: Sequence["Task"],
    models: Sequence[Weights],
    config: EvaluationConfig,
    device: str,
    began: float,
) -> None:
    """How much there is to evaluate; reading and writing it is a step of its own."""
    if not windows and not tasks:
        return
    from compress.evaluation.cost import announcement, task_announcement

    count, spec = len(models), models[-1].spec
    read = "texts read" if windows else "tasks read"
    progress(Event("evaluate", read, 1, 1, time.perf_counter() - began))
    if tasks:
        progress(note("evaluate", task_announcement(tasks, spec, config, count, device)))
    if windows:
        progress(note("evaluate", announcement(windows, spec, config, count, device)))


def _tokenizer(folder: Path, config: EvaluationConfig) -> Tokenizer | None:
    """The result's tokenizer; None where there is none and only text of the model's own is read."""
    try:
        return load_tokenizer(folder)
    except (DataError, DependencyError):
        texts = any(text.kind != "self" for text in config.texts)
        if config.samples.prompts or config.tasks or texts:
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
