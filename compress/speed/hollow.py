"""Decoders that leave work out, by which the rest of a step is measured."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from compress.arch.forward.forward import ForwardSpec
from compress.arch.spec import LinearSpec
from compress.formats import Weights
from compress.quant.tensor import InputQuantization
from compress.runtime.decoder.build import Loader
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.kv import KVCache
from compress.runtime.decoder.linear import Linear, facts_of
from compress.runtime.engine.batch import FlatBatch, TextChunk, build_batch
from compress.runtime.engine.engine import Engine
from compress.runtime.engine.interfaces import StepInput, StepLayout
from compress.runtime.engine.refusals import ModelFacts
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.forms.dense import FloatWeight, kept_in
from compress.runtime.forms.form import Arithmetic, LinearWeight
from compress.runtime.forms.table import chosen_form
from compress.runtime.sequences.request import Request, Sampling
from compress.speed.timer import Timer

# Tokens of the texts by which planning is measured; they fill a block of the cache.
PROMPT, STEPS = 2, 14
# Read in place of a weight, or as much as it has; of those that are read in turn, more than caches
# hold.
PIECE, ALL_PIECES = 4 << 20, 128 << 20


@dataclass(slots=True, eq=False)
class MemoryReader:
    """Reads memory as products would, so that what else a step needs lies in caches as it would
    then. seconds: spent on that; they count for nothing.

    On a GPU nothing is read: its products leave the processor's caches alone.
    """

    timer: Timer
    buffer: Tensor
    at: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, timer: Timer, nbytes: int) -> "MemoryReader":
        """nbytes: that a step reads, at most."""
        count = min(ALL_PIECES, nbytes) // 4 if timer.device.type == "cpu" else 0
        return cls(timer, torch.ones(count))

    def at_once(self, nbytes: int) -> None:
        """As much as a whole step reads. By numpy: torch's threads would go on spinning beside the
        step that is measured."""
        start = self.timer.clock()
        np.sum(self.buffer[: nbytes // 4].numpy())
        self.seconds += self.timer.clock() - start

    def read(self, nbytes: int) -> None:
        if not len(self.buffer):
            return
        start = self.timer.clock()
        count = min(nbytes, PIECE) // 4
        if self.at + count > len(self.buffer):
            self.at = 0
        self.buffer[self.at : self.at + count].sum()
        self.at += count
        self.seconds += self.timer.clock() - start

    def without(self, call: Callable[[], object]) -> float:
        """Seconds of a call, less those that were spent here."""
        self.seconds, start = 0.0, self.timer.now()
        call()
        return self.timer.now() - start - self.seconds


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """A form of weights [N, K] whose products [rows, N] are there already. It stands in none of the
    tables: no weight takes it by itself."""

    shape: tuple[int, int]
    nbytes: int
    outputs: Tensor
    weights: MemoryReader

    def matmul(self, x: Tensor, inputs: InputQuantization | None, bias: Tensor | None) -> Tensor:
        self.weights.read(self.nbytes)
        return self.outputs[: len(x)]

    def joined(self, others: tuple[LinearWeight, ...]) -> None:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _Hollow(Loader):
    """Norms are read; products are ready, with shared outputs. rows: at most."""

    rows: int
    read: MemoryReader
    made: dict[int, Tensor] = field(default_factory=dict)

    def linear(self, spec: LinearSpec) -> Linear:
        facts = facts_of(self.weights, spec)
        form = chosen_form(facts, self.arithmetic).form
        return self._ready(spec.shape, form.nbytes(facts, self.arithmetic))

    def dense(self, weight: Tensor) -> Linear:
        return self._ready((weight.shape[0], weight.shape[1]), weight.nbytes)

    def _ready(self, shape: tuple[int, int], nbytes: int) -> Linear:
        width = shape[0]
        if width not in self.made:
            # Random, so that a router sends tokens to all experts.
            values = torch.rand(self.rows, width, dtype=torch.float32)
            self.made[width] = values.to(self.device, self.dtype)
        return Linear(_Ready(shape, nbytes, self.made[width], self.read))

    def embedding(self, spec: LinearSpec, tied: bool) -> FloatWeight:
        return empty_embedding(self, spec)


def empty_embedding(loader: Loader, spec: LinearSpec) -> FloatWeight:
    """One row in place of all."""
    dtype = kept_in(facts_of(loader.weights, spec).stored, loader.arithmetic)
    row = torch.zeros(1, spec.shape[1], dtype=dtype, device=loader.device)
    return FloatWeight(row.expand(spec.shape))


@dataclass(frozen=True, slots=True, eq=False)
class Hollow:
    """The decoder of a checkpoint whose products cost nothing.

    vocabulary: of its logits.
    """

    decoder: Decoder
    read: MemoryReader
    vocabulary: int

    @classmethod
    def of(
        cls,
        weights: Weights,
        how: ForwardSpec,
        arithmetic: Arithmetic,
        rows: int,
        read: MemoryReader,
    ) -> "Hollow":
        """rows: of a step, at most."""
        decoder = Decoder.of(_Hollow(weights, how, arithmetic, rows, read))
        return cls(decoder, read, weights.spec.vocab)

    def between(self, rows: int) -> float:
        """Seconds of all that stands between products in a step with the first token of each of so
        many texts. The head is left out."""
        how, device = self.decoder.how, self.decoder.device
        blocks = [1 + rows] * len(how.windows)
        cache = KVCache(how, blocks, 1, dtype=self.decoder.dtype, device=device)
        batch = first_tokens(self.decoder, rows)
        call = partial(self.decoder.forward, batch, cache)
        runs = [self.read.without(call) for _ in range(self.read.timer.runs + 1)]
        return statistics.median(runs[1:])

    def host(self, texts: int) -> float:
        """Seconds that the engine takes around the decoder, in a step that adds a token to each of
        so many texts."""
        decoder = self.decoder
        cache = KVCache(
            decoder.how,
            [1 + texts] * len(decoder.how.windows),
            PROMPT + STEPS,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        facts = ModelFacts(PROMPT + STEPS, self.vocabulary)
        logits = torch.zeros(1, self.vocabulary, device=decoder.device)
        engine = Engine(_Around(LocalRunner(decoder, cache), self.read, logits), facts, reuse=False)
        for request in requests(texts):
            engine.add(request)
        found = []
        while not engine.idle:
            found.append(self.read.without(engine.step))
        return statistics.median(found[1:-1])


@dataclass(frozen=True, slots=True, eq=False)
class _Around:
    """Steps whose time counts for nothing. row: the logits of all, fp32 [1, vocabulary]."""

    inner: LocalRunner[KVCache]
    read: MemoryReader
    row: Tensor

    @property
    def layout(self) -> StepLayout:
        return self.inner.layout

    def run(self, step: StepInput) -> Iterator[Tensor]:
        before, start = self.read.seconds, self.read.timer.now()
        self.inner.run(step)
        self.read.seconds = before + self.read.timer.now() - start
        rows = len(step.batch.rows)
        return (self._logits(min(step.rows, rows - at)) for at in range(0, rows, step.rows))

    def _logits(self, count: int) -> Tensor:
        self.read.read(PIECE)
        return self.row.expand(count, -1)


def first_tokens(decoder: Decoder, rows: int) -> FlatBatch:
    """Of so many texts, each in a block of the cache."""
    groups = len(decoder.how.windows)
    chunks = [TextChunk((0,), 0, 0, ((1 + i,),) * groups, 1) for i in range(rows)]
    return build_batch(chunks, 1, decoder.multiple).to(decoder.device)


def requests(texts: int) -> Iterator[Request]:
    """Of texts by which planning is measured."""
    sampling = Sampling(max_tokens=STEPS, ignore_eos=True)
    return (Request(str(i), (0,) * PROMPT, sampling) for i in range(texts))
