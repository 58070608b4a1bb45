"""What the compression cost: perplexity, KL, agreement and samples, as the recipe asks."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compress.errors import DataError, DependencyError
from compress.evaluation.compared import Compared
from compress.evaluation.task_quality import LEFT_OUT, measure_tasks, read_tasks
from compress.evaluation.vocabulary import refuse_other_tokenizer
from compress.evaluation.workspace import Workspace
from compress.events import Event, note
from compress.formats import Weights
from compress.recipe.evaluation_config import DEFAULT_WINDOW_CAP, EvaluationConfig
from compress.report.records.quality import MathQuality, PlainQuality, Quality, TextQuality
from compress.report.schema import Sample
from compress.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from compress.evaluation.tasks.asked import Task
    from compress.evaluation.text_quality import TextScores
    from compress.evaluation.windows import TokenWindows
    from compress_kernels.panels import Math

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
    sides: Compared,
    config: EvaluationConfig | None,
    work: Workspace,
    *,
    all_or_none: bool = False,
    math: "Math | None" = None,
) -> Measured:
    """Evaluate a result, against its source where there is one.

    work: its folder is made and removed again. A text or task that cannot be had (no memory to
    sample it, a file that is gone) is left out: the result is worth more than the measurement.
    all_or_none: it raises DataError instead. math: of the engine, whose cost on the texts is asked
    too; RequestError where the result has no such products.
    """
    if config is None:
        return Measured(None, (), NOT_ASKED)
    # Late: a data-free run without evaluation never loads transformers.
    from compress.evaluation.samples import sample_pairs

    source, tokenizer = sides.source, _tokenizer(sides.result, config)
    began = time.perf_counter()
    tasks, lacking = read_tasks(config, tokenizer, sides.models)
    if source is not None and tokenizer is not None:
        asked = {task.config.name: task.texts for task in tasks}
        refuse_other_tokenizer(tokenizer, source.checkpoint.small, config.texts, asked)
    windows, left_out = _windows(sides.origin, config, tokenizer, work)
    left_out = _lacking((*left_out, *lacking), all_or_none)
    if windows or tasks:
        read = "texts read" if windows else "tasks read"
        work.progress(Event("evaluate", read, 1, 1, time.perf_counter() - began))
        _announce(windows, tasks, sides, config, work)
    costs = _of_math(sides.result, windows, math, work)
    done = measure_tasks(tasks, sides, tokenizer, config, work)
    left_out += _lacking(done.left_out, all_or_none)
    texts = _texts(sides, windows, config, work, costs)
    samples, reason = sample_pairs(sides.result, source, tokenizer, config.samples, work)
    return Measured(
        Quality(texts, dict(done.tasks), sides.plain_reason if texts else None)
        if texts or done.tasks
        else None,
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
    sides: Compared,
    windows: list["TokenWindows"],
    config: EvaluationConfig,
    work: Workspace,
    costs: tuple[MathQuality | None, ...],
) -> tuple[TextQuality, ...]:
    """Of texts, block-streamed. costs: of the engine's math, on each."""
    if not windows:
        return ()
    work.folder.mkdir(exist_ok=True)
    try:
        found = _scores(sides, windows, config, work)
    finally:
        shutil.rmtree(work.folder, ignore_errors=True)
    return tuple(replace(text, math=cost) for text, cost in zip(found, costs, strict=True))


def _scores(
    sides: Compared,
    windows: list["TokenWindows"],
    config: EvaluationConfig,
    work: Workspace,
) -> list[TextQuality]:
    """Of the result and, where there is one, of its source plainly rounded: one after the other
    beside the source's hidden states, so that two models' states are the most that is kept."""
    from compress.evaluation.text_quality import evaluate, source_final_states

    source, plain = sides.source, sides.plain
    if source is None or plain is None:
        found = evaluate(sides.result, source, windows, config, work)
        return [TextQuality(**asdict(text)) for text in found]
    states = source_final_states(source, windows, config, work)
    try:
        found = evaluate(sides.result, source, windows, config, work, states)
        beside = evaluate(plain, source, windows, config, replace(work, label="plain"), states)
    finally:
        states.close()
    return [
        TextQuality(**asdict(text), plain=_plain_quality(text, rounded))
        for text, rounded in zip(found, beside, strict=True)
    ]


def _plain_quality(result: "TextScores", rounded: "TextScores") -> PlainQuality:
    from compress.evaluation.text_quality import share_closed

    closed = share_closed(result, rounded)
    return PlainQuality(rounded.ppl_result, rounded.kl, rounded.top1_agreement, closed)


def _of_math(
    result: Weights, windows: list["TokenWindows"], math: "Math | None", work: Workspace
) -> tuple[MathQuality | None, ...]:
    """What the engine's math costs on each text, None where that is not asked. It comes before all
    else that is measured: an engine that does not open, as for lack of memory, says so before
    hours of work and not behind them."""
    if math is None or not windows:
        return (None,) * len(windows)
    from compress.evaluation.math_quality import measure_math

    return measure_math(result, windows, math, work.progress)


def _announce(
    windows: list["TokenWindows"],
    tasks: Sequence["Task"],
    sides: Compared,
    config: EvaluationConfig,
    work: Workspace,
) -> None:
    """How much there is to evaluate."""
    from compress.evaluation.cost import announcement, task_announcement

    count, spec, device = len(sides.models), sides.result.spec, work.device
    if tasks:
        work.progress(note("evaluate", task_announcement(tasks, spec, config, count, device)))
    if windows:
        count += sides.plain is not None
        work.progress(note("evaluate", announcement(windows, spec, config, count, device)))


def _tokenizer(result: Weights, config: EvaluationConfig) -> Tokenizer | None:
    """The result's tokenizer; None where there is none and only text of the model's own is read."""
    try:
        return load_tokenizer(result.checkpoint.small)
    except (DataError, DependencyError):
        texts = any(text.kind != "self" for text in config.texts)
        if config.samples.prompts or config.tasks or texts:
            raise
        return None


def _windows(
    origin: Weights,
    config: EvaluationConfig,
    tokenizer: Tokenizer | None,
    work: Workspace,
) -> tuple[list["TokenWindows"], tuple[str, ...]]:
    """Windows of every text that can be had, and a line about each one that cannot."""
    from compress.evaluation.texts import read_windows

    def write(count: int, length: int, seed: int) -> Tensor:
        return _sampled(origin, count, length, seed, work)

    context = origin.spec.context or DEFAULT_WINDOW_CAP
    windows, left_out = [], []
    for text in config.texts:
        try:
            windows.append(read_windows(text, config, tokenizer, context, write))
        except DataError as error:
            left_out.append(f"evaluation text {text.name!r}{LEFT_OUT}: {error}")
    return windows, tuple(left_out)


def _sampled(weights: Weights, count: int, length: int, seed: int, work: Workspace) -> Tensor:
    """Text of the model's own, in the arithmetic of the evaluation: ids int64 [count, length]."""
    from compress.blocks.author import Author
    from compress.blocks.sample import OwnText
    from compress.evaluation.stream import make_skeleton

    author = Author(weights, partial(make_skeleton, weights, torch.float32, work), work.kept)
    return author.write(OwnText(count, length, seed), "evaluate", work.progress)
