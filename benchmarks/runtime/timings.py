"""When the tokens of a load came, and what a reader wants to know of that."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from compress.speed.load import percentile


@dataclass(frozen=True, slots=True)
class Timings:
    """tokens: of each request, the seconds from the start of the load to each of its tokens.

    cpu_s: processor time of the whole load, which other work on the machine adds little to.
    """

    tokens: list[list[float]]
    cpu_s: float


def summary(runs: Sequence[Timings]) -> dict[str, float]:
    """Of all runs together; throughput is the median of theirs. Seconds, tokens a second."""
    first = [times[0] for run in runs for times in run.tokens]
    gaps = [b - a for run in runs for times in run.tokens for a, b in pairwise(times)]
    total = [sum(map(len, run.tokens)) for run in runs]
    walls = [max(times[-1] for times in run.tokens) for run in runs]
    rates = [count / wall for count, wall in zip(total, walls, strict=True)]
    of_cpu = [count / run.cpu_s for count, run in zip(total, runs, strict=True)]
    return {
        "tokens_per_s": statistics.median(rates),
        "tokens_per_cpu_s": statistics.median(of_cpu),
        "ttft_p50_s": percentile(first, 50),
        "ttft_p99_s": percentile(first, 99),
        "inter_token_p50_s": percentile(gaps, 50),
        "inter_token_p99_s": percentile(gaps, 99),
    }
