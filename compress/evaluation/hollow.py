"""Decoders that leave work out, by which the rest of a step is measured."""

import statistics
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from compress.arch.forward import ForwardSpec
from compress.arch.spec import LinearSpec
from compress.evaluation.timer import Timer
from compress.runtime.batch import FlatBatch
from compress.runtime.decoder import Decoder
from compress.runtime.engine import Engine
from compress.runtime.kv import KVCache
from compress.runtime.linear import Linear, Source
from compress.runtime.loading import Loader
from compress.runtime.refusals import ModelFacts
from compress.runtime.request import Request, Sampling
from compress.runtime.tables import CacheGroup

# Steps of output that are timed.
STEPS = 24


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """Stands in for a linear: its outputs [rows, N] are there already."""

    outputs: Tensor
    weight: None = None
    bias: None = None
    inputs: None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.outputs[: len(x)]


@dataclass(frozen=True, slots=True, eq=False)
class _Hollow(Loader):
    """Norms are read; products are ready, with shared outputs. rows: at most."""

    rows: int = 0
    made: dict[int, Tensor] = field(default_factory=dict)

    def linear(self, spec: LinearSpec) -> Linear:
        width = spec.shape[0]
        if width not in self.made:
            # Random, so that a router sends tokens to all experts.
            values = torch.rand(self.rows, width, dtype=torch.float32)
            self.made[width] = values.to(self.device, self.dtype)
        return cast(Linear, _Ready(self.made[width]))

    def tensor(self, name: str) -> Tensor:
        spec = self.weights.spec
        if name == spec.embedding:
            row = torch.zeros(1, spec.embedding_shape[1], dtype=self.dtype, device=self.device)
            return row.expand(spec.embedding_shape)
        return Loader.tensor(self, name)


def hollow_decoder(
    weights: Source, how: ForwardSpec, dtype: torch.dtype, device: torch.device, rows: int
) -> Decoder:
    """The decoder of a checkpoint with all that stands between products. rows: of a step, most."""
    return Decoder.of(_Hollow(weights, how, dtype, device, rows))


def steps_of_rows(decoder: Decoder, rows: int, timer: Timer) -> float:
    """Seconds of a step with the first token of each of `rows` texts, without the head."""
    how, device = decoder.how, decoder.device
    cache = KVCache(how, [1 + rows] * len(how.windows), 1, dtype=decoder.dtype, device=device)
    at = torch.arange(rows, device=device)
    table = torch.arange(1, rows + 2, dtype=torch.int32, device=device)[:, None] % (rows + 1)
    batch = FlatBatch(
        ids=torch.zeros_like(at),
        positions=torch.zeros_like(at),
        sequence=at.to(torch.int32),
        tables=(table,) * len(how.windows),
        slots=(at + 1,) * len(how.windows),
        rows=at,
        count=rows,
        multiple=decoder.multiple,
        lengths=torch.ones(rows + 1, dtype=torch.int64, device=device),
    )
    return timer.seconds(lambda: decoder.forward(batch, cache))


@dataclass(frozen=True, slots=True)
class Places:
    """A cache that holds nothing: blocks are counted only."""

    block_size: int
    groups: tuple[CacheGroup, ...]

    def copy(self, source: int, target: int, group: int) -> None:
        """Nothing is there to be copied."""


@dataclass(frozen=True, slots=True, eq=False)
class _Idle:
    """A decoder that computes nothing. row: its logits, fp32 [1, vocabulary]. multiple: of rows."""

    row: Tensor
    multiple: int

    @property
    def device(self) -> torch.device:
        return self.row.device

    def forward(self, batch: FlatBatch, cache: Places) -> Tensor:
        return self.row.new_zeros(len(batch.rows), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.row.expand(len(hidden), -1)


def step_seconds(vocabulary: int, texts: int, device: torch.device, timer: Timer) -> float:
    """Seconds of a step that adds a token to each of `texts` texts, with nothing to compute."""
    places = Places(16, (CacheGroup(None, 1 + texts * (1 + STEPS // 8)),))
    idle = _Idle(torch.zeros(1, vocabulary, device=device), 1)
    engine: Engine[Any] = Engine(idle, places, ModelFacts(10 * STEPS, vocabulary), reuse=False)
    sampling = Sampling(max_tokens=STEPS, ignore_eos=True)
    for i in range(texts):
        engine.add(Request(str(i), (0, 0), sampling))
    found = []
    while not engine.idle:
        start = timer.now()
        engine.step()
        found.append(timer.now() - start)
    return statistics.median(found[1:-1])
