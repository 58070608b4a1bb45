"""From a value an item to the numbers of a task, each with its standard error."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """What a model did on a task.

    values: metric -> a value an item: 1 or 0 of "acc", "acc_norm" and "exact_match"; of
        "perplexity" the log-likelihood (nats) of the item's continuation.
    answers: of each item what the model chose or wrote; equal answers are equal.
    """

    values: Mapping[str, tuple[float, ...]]
    answers: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Number:
    """value: of all items. error: its standard error over items, None for a single one."""

    value: float
    error: float | None


def number(metric: str, values: Sequence[float]) -> Number:
    """The mean; of "perplexity" exp of minus the mean, with the error that follows from it."""
    value, slope = _value(metric, values)
    return Number(value, _error([slope * v for v in values]))


def difference(metric: str, source: Sequence[float], result: Sequence[float]) -> Number:
    """result - source. Both saw the same items, so the error is that of the items' differences,
    which is smaller than those of the two where they mostly agree."""
    before, a = _value(metric, source)
    after, b = _value(metric, result)
    pairs = zip(source, result, strict=True)
    return Number(after - before, _error([b * y - a * x for x, y in pairs]))


def agreement(source: TaskOutcome, result: TaskOutcome) -> float:
    """The share of items with the same answer from both."""
    pairs = zip(source.answers, result.answers, strict=True)
    return sum(x == y for x, y in pairs) / len(source.answers)


def _value(metric: str, values: Sequence[float]) -> tuple[float, float]:
    """The number, and how much it moves with the mean."""
    mean = math.fsum(values) / len(values)
    if metric != "perplexity":
        return mean, 1.0
    try:
        perplexity = math.exp(-mean)
    except OverflowError:
        return math.inf, math.nan
    return perplexity, -perplexity


def _error(values: Sequence[float]) -> float | None:
    """Standard error of the mean, None where there is none."""
    count = len(values)
    if count < 2 or not all(map(math.isfinite, values)):
        return None
    mean = math.fsum(values) / count
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (count - 1) / count)
