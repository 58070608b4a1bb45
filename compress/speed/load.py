"""Requests that are all there at the start: served by an engine, or in predicted time."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from compress.runtime.engine.batch import FlatBatch
from compress.runtime.engine.engine import Engine
from compress.runtime.engine.interfaces import StepInput, StepLayout
from compress.runtime.engine.refusals import ModelFacts
from compress.runtime.sampling.sampling import Choice
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import Request, Sampling
from compress.runtime.sequences.tables import CacheGroup
from compress.speed.roofline import EngineRates, expected
from compress.speed.workload import Looks, StepLoad, Workload

BLOCK = 16


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """prompt: token ids. output: tokens that are generated, whatever they are."""

    prompt: tuple[int, ...]
    output: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Of a load, in seconds and tokens a second. between: from one token of a text to the next;
    None where texts have one token each.
    """

    tokens_per_second: float
    first_p50: float
    first_p99: float
    between_p50: float | None
    between_p99: float | None
    seconds: float


def play(
    engine: Engine, jobs: Sequence[LoadRequest], clock: Callable[[], float] = monotonic
) -> list[list[float]]:
    """Serves the jobs; of each the seconds from the start to each of its tokens."""
    times: dict[str, list[float]] = {str(i): [] for i in range(len(jobs))}
    start = clock()
    for i, job in enumerate(jobs):
        sampling = Sampling(max_tokens=job.output, ignore_eos=True)
        engine.add(Request(str(i), job.prompt, sampling))
    while not engine.idle:
        updates, now = engine.step(), clock() - start
        for update in updates:
            times[update.id] += [now] * len(update.tokens)
    return list(times.values())


def predict(
    work: Workload,
    rates: EngineRates,
    jobs: Sequence[LoadRequest],
    limits: Limits | None = None,
    *,
    reuse: bool = True,
) -> list[list[float]]:
    """As `play`, in predicted time: the engine plans its steps, and each takes what is expected.

    The cache has room for all jobs. reuse: texts that begin alike share keys and values.
    """
    blocks = 1 + sum(-(-(len(job.prompt) + job.output) // BLOCK) + 1 for job in jobs)
    clock = _Clock(work, rates, StepLayout((CacheGroup(None, blocks),), BLOCK, multiple=1))
    vocabulary = 1 + max(token for job in jobs for token in job.prompt)
    longest = max(len(job.prompt) + job.output for job in jobs)
    facts = ModelFacts(longest, vocabulary)
    engine = Engine(clock, facts, limits, reuse=reuse, sampler=_zeros)
    return play(engine, jobs, lambda: clock.seconds)


def speed_of(times: Sequence[Sequence[float]]) -> Speed:
    """times: as `play` gave them."""
    first = [own[0] for own in times]
    gaps = [b - a for own in times for a, b in pairwise(own)]
    seconds = max(own[-1] for own in times)
    return Speed(
        tokens_per_second=sum(map(len, times)) / seconds,
        first_p50=percentile(first, 50),
        first_p99=percentile(first, 99),
        between_p50=percentile(gaps, 50) if gaps else None,
        between_p99=percentile(gaps, 99) if gaps else None,
        seconds=seconds,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that so many percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def even_load(batch: int, prompt: int, output: int, vocabulary: int = 2) -> list[LoadRequest]:
    """`batch` jobs of one size. vocabulary: ids are below it."""
    return [
        LoadRequest(tuple((31 * job + 7 * i * i + i) % vocabulary for i in range(prompt)), output)
        for job in range(batch)
    ]


@dataclass(slots=True, eq=False)
class _Clock:
    """Computes nothing of a step but how long it would take."""

    work: Workload
    rates: EngineRates
    layout: StepLayout
    seconds: float = 0.0

    def run(self, step: StepInput) -> Iterator[Tensor]:
        self.seconds += expected(self.work, self.rates, step_load(self.work, step.batch)).total
        return iter((torch.zeros(len(step.batch.rows), 1),))


def step_load(work: Workload, batch: FlatBatch) -> StepLoad:
    """What a batch without padding has to do."""
    owners, places, counts = torch.unique(batch.sequence, return_inverse=True, return_counts=True)
    alone = counts[places] == 1
    ends = torch.zeros_like(counts).scatter_reduce(0, places, batch.positions + 1, "amax")
    looks = []
    for part in work.attention:
        single = several = states = 0
        for window in part.windows:
            seen = batch.positions + 1
            seen = seen if window is None else seen.clamp(max=window)
            single += int(seen[alone].sum())
            several += int(seen[~alone].sum())
            read = ends if window is None else ends.minimum(window - 1 + counts)
            states += int(read.sum())
        looks.append(Looks(single, several, states))
    return StepLoad(len(batch.ids), len(owners), len(batch.rows), tuple(looks))


def _zeros(logits: Tensor, sequences: Sequence[Any]) -> list[Choice | None]:
    return [Choice(0, None)] * len(sequences)
