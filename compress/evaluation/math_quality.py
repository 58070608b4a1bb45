"""What the math of an engine costs: texts through one that is exact and one that rounds inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compress.errors import RequestError
from compress.evaluation.head import FinalStates, ScoredTokens, score
from compress.evaluation.perplexity import perplexity
from compress.evaluation.windows import TokenWindows
from compress.events import Progress, by_tenths
from compress.formats import Weights
from compress.plan.row_counts import chunk_rows
from compress.report.records.quality import MathQuality
from compress.runtime.engine.batch import FlatBatch
from compress.runtime.engine.engine import Engine
from compress.runtime.engine.interfaces import DecoderLike
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.loading.math import settled_math
from compress.runtime.loading.open_engine import Opening, open_engine
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import Request
from compress_kernels.panels import Math


def measure_math(
    weights: Weights, texts: Sequence[TokenWindows], math: Math, progress: Progress
) -> tuple[MathQuality, ...]:
    """Of each text: perplexity with that math, KL(exact || math) and agreement. In fp32 on the CPU.

    Both engines are in memory at once. Raises RequestError where they do not fit, and where nothing
    of the model would be rounded so.
    """
    settled_math(weights, math, torch.float32, "cpu")
    longest = max(int(text.lengths.max()) for text in texts)
    exact, rounded = (_opened(weights, each, longest) for each in ("exact", math))
    total = sum(len(text.lengths) for text in texts)
    tell, done, found = by_tenths(progress, f"evaluate {math}", "windows read"), 0, []
    for text in texts:
        sums = torch.zeros(3, dtype=torch.float64)
        for row, length, first in zip(text.ids, text.lengths, text.first, strict=True):
            sums += _of_window(exact, rounded, row[: int(length)], int(first))
            tell(done := done + 1, total)
        nll, kl, same = sums.tolist()
        count = text.scored
        found.append(MathQuality(math, perplexity(nll, count), kl / count, same / count))
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class _Watched:
    """A decoder whose final states are kept. states: of each step [rows, hidden]."""

    decoder: DecoderLike[Any]
    states: list[Tensor] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def multiple(self) -> int:
        return self.decoder.multiple

    def forward(self, batch: FlatBatch, cache: Any) -> Tensor:
        self.states.append(self.decoder.forward(batch, cache))
        return self.states[-1]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    engine: Engine
    watched: _Watched

    def of_window(self, ids: Tensor, first: int) -> FinalStates:
        """Of the positions that predict the tokens from `first` on."""
        self.watched.states.clear()
        (result,) = self.engine.generate([Request("", tuple(ids.tolist()), score_from=first)])
        if result.error is not None:
            raise RequestError(result.error)
        states = torch.cat(self.watched.states)
        assert len(states) == len(ids) - first, "steps of fp32 on the CPU have no padding"
        return FinalStates(lambda start, stop: states[start:stop], self.watched.logits)


def _opened(weights: Weights, math: Math, longest: int) -> _Side:
    """An engine as it serves, one text at a time."""
    opening = Opening(math=math, limits=Limits(sequences=1), cache_tokens=longest)
    engine, _ = open_engine(weights, opening)
    runner = engine.runner
    assert isinstance(runner, LocalRunner), "engines that are opened compute here"
    watched = _Watched(runner.decoder)
    tapped = LocalRunner(watched, runner.cache)
    return _Side(Engine(tapped, engine.facts, engine.limits, reuse=False), watched)


def _of_window(exact: _Side, rounded: _Side, ids: Tensor, first: int) -> Tensor:
    """Sums over the tokens from `first` on: nll with the math, KL, agreement: fp64 [3]."""
    targets = ids[first:]
    tokens = ScoredTokens(targets, torch.zeros_like(targets), texts=1)
    after, before = (side.of_window(ids, first) for side in (rounded, exact))
    rows = chunk_rows(exact.engine.facts.vocabulary)
    found = score(after, before, tokens, rows=rows)
    assert found.kl is not None, "there are two sides"
    assert found.agreement is not None, "there are two sides"
    return torch.cat((found.nll_result, found.kl, found.agreement))
