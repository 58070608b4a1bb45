"""How long an evaluation will take, so that nobody waits for minutes without having been told."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from compress.arch.spec import DecoderSpec
from compress.blocks.live import live_bytes
from compress.evaluation.task_quality import SEQUENCES
from compress.plan import probes
from compress.plan.estimate import DISPATCH_SECONDS, attention_seconds
from compress.recipe.evaluation_config import EvaluationConfig
from compress.report.units import counted, duration

if TYPE_CHECKING:
    from compress.evaluation.tasks.asked import Task
    from compress.evaluation.windows import TokenWindows

LONG_SECONDS = 30
FEWER = "max_tokens of a text (eval: --max-tokens) takes fewer"
FEWER_ITEMS = "max_items of a task (eval: --max-items) takes fewer"
# Passes over logits: largest, shift, exponentials, sum and logarithm of each model in fp32; then
# two exponentials and their sums, a difference, a comparison, a product, a sum in fp64 and two
# searches.
_ALONE, _COMPARED = 6, 16


def announcement(
    windows: Sequence["TokenWindows"],
    spec: DecoderSpec,
    config: EvaluationConfig,
    models: int,
    device: str = "cpu",
) -> str:
    """One line on what is to be evaluated, with the time where that is long.

    models: 1, 2 with a source, 3 with plain rounding too. device: that the models run on; only the
    processor's time is known.
    """
    scored, count = sum(text.scored for text in windows), sum(len(text.lengths) for text in windows)
    line = f"{counted(scored, 'token')} in {counted(count, 'window')}"
    if device != "cpu":
        return line
    seconds = evaluation_seconds(windows, spec, config, models)
    if seconds < LONG_SECONDS:
        return line
    return f"{line}, about {duration(seconds)} on this processor; {FEWER}"


def task_announcement(
    tasks: Sequence["Task"],
    spec: DecoderSpec,
    config: EvaluationConfig,
    models: int,
    device: str = "cpu",
) -> str:
    """The same for tasks."""
    items, tokens = sum(len(task.items) for task in tasks), sum(task.tokens for task in tasks)
    what = f"{counted(items, 'item')} of {counted(len(tasks), 'task')}"
    line = f"{what}, {counted(tokens, 'token')} at most"
    if device != "cpu":
        return line
    seconds = task_seconds(tasks, spec, config, models)
    if seconds < LONG_SECONDS:
        return line
    return f"{line}, about {duration(seconds)} on this processor; {FEWER_ITEMS}"


def task_seconds(
    tasks: Sequence["Task"], spec: DecoderSpec, config: EvaluationConfig, models: int
) -> float:
    """As `evaluation_seconds`, for what no item shares with another and outputs of full length."""
    dtype = torch.float32 if config.dtype == "fp32" else torch.bfloat16
    rates = probes.measure_rates(dtype)
    seconds = 0.0
    for task in tasks:
        length = max(len(begin) + len(tail) for begin, tail in task.pairs)
        most = 0 if task.sampling is None else task.sampling.max_tokens
        rows = sum(len(tail) for _, tail in task.pairs) + most * len(task.items)
        steps = -(-len(task.items) // SEQUENCES) * most
        seconds += _block_seconds(task.tokens, length + most, spec, rates, dtype)
        seconds += rows * 2 * spec.vocab * spec.hidden / rates.product
        seconds += steps * len(spec.blocks) * DISPATCH_SECONDS
    return models * seconds


def evaluation_seconds(
    windows: Sequence["TokenWindows"], spec: DecoderSpec, config: EvaluationConfig, models: int
) -> float:
    """Counted work over rates that are measured here and now, without reading weights."""
    dtype = torch.float32 if config.dtype == "fp32" else torch.bfloat16
    rates = probes.measure_rates(dtype)
    seen = sum(int(text.lengths.sum()) for text in windows)
    scored = sum(text.scored for text in windows)
    length = max((text.ids.shape[1] for text in windows), default=1)
    blocks = _block_seconds(seen, length, spec, rates, dtype)
    head = scored * 2 * spec.vocab * spec.hidden / rates.product_fp32
    passes = _COMPARED if models > 1 and config.kl else _ALONE
    compared = passes * 4 * scored * spec.vocab / rates.elementwise
    return models * (blocks + head) + compared * models / 2


def _block_seconds(
    tokens: int, length: int, spec: DecoderSpec, rates: probes.MachineRates, dtype: torch.dtype
) -> float:
    """One model's blocks over so many tokens in windows of `length`."""
    blocks = len(spec.blocks)
    weights = _weights_of_a_token(spec)
    live = live_bytes(spec, tokens, dtype.itemsize)
    row = attention_seconds((1, spec.heads, length, spec.head_dim), length, dtype)
    return (
        2 * tokens * weights / rates.product
        + blocks * row * tokens / length
        + 2 * blocks * live / rates.elementwise
    )


def _weights_of_a_token(spec: DecoderSpec) -> float:
    """Weights of all blocks that a token is multiplied with: of experts, those it is sent to."""
    sent = spec.experts_per_token / spec.experts if spec.experts else 1.0
    return sum(prod(x.shape) * (1.0 if x.expert is None else sent) for x in spec.linears())
