"""A decoder without weights whose logits are a hash of all tokens it can see.

It reads them back from the cache through the block tables, so one wrong block, a stale copy or a
missing one gives other tokens. The values of its second layer hash those of the first, as far as
they could be seen when they were written: what was wrong once stays wrong.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.runtime.engine.batch import FlatBatch
from compress.runtime.engine.engine import Engine
from compress.runtime.engine.refusals import ModelFacts
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.sampling.head import Sampler
from compress.runtime.sampling.sampling import Choice
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import Request
from compress.runtime.sequences.sequence import Sequence
from compress.runtime.sequences.stops import Decode
from compress.runtime.sequences.tables import CacheGroup

VOCABULARY = 23
CONTEXT = 96
# Texts that come with more tokens than this are computed otherwise, as with longrope.
LONG = 30
U64 = np.uint64
Hashes = NDArray[np.uint64]
FACTORS = np.random.default_rng(7).integers(1, 2**63, CONTEXT, dtype=U64) | U64(1)
COLUMNS = np.random.default_rng(8).integers(1, 2**63, VOCABULARY, dtype=U64) | U64(1)


def variant(length: int) -> int:
    return int(length > LONG)


def mix(values: Hashes) -> Hashes:
    values = (values ^ (values >> U64(31))) * U64(0x9E3779B97F4A7C15)
    return (values ^ (values >> U64(29))) * U64(0xBF58476D1CE4E5B9)


def embed(ids: NDArray[np.int64], positions: NDArray[np.int64], variants: Hashes) -> Hashes:
    return mix(ids.astype(U64) * U64(1_000_003) + positions.astype(U64) * U64(257) + variants)


def table_of_logits(hidden: Hashes) -> NDArray[np.float32]:
    """[rows] -> [rows, VOCABULARY], from 0 to 8."""
    return (mix(hidden[:, None] * COLUMNS) >> U64(44)).astype(np.float32) / np.float32(2**17)


@dataclass
class FakeCache:
    """Two layers for each group, full of what nobody wrote."""

    groups: tuple[CacheGroup, ...]
    block_size: int
    memory: list[Hashes] = field(init=False)

    def __post_init__(self) -> None:
        garbage = np.random.default_rng(9)
        sizes = [group.blocks * self.block_size for group in self.groups] * 2
        self.memory = [garbage.integers(0, 2**63, size, dtype=U64) for size in sizes]

    def copy(self, source: int, target: int, group: int) -> None:
        size = self.block_size
        for memory in self.memory[group :: len(self.groups)]:
            memory[target * size : (target + 1) * size] = memory[
                source * size : (source + 1) * size
            ]


@dataclass
class FakeDecoder:
    """fail: raised by the next forward, once. multiple: of rows, that it asks for."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    fail: BaseException | None = None
    multiple: int = 16
    batches: list[FlatBatch] = field(default_factory=list)

    def forward(self, batch: FlatBatch, cache: FakeCache) -> Tensor:
        self.batches.append(batch)
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        positions, sequence = batch.positions.numpy(), batch.sequence.numpy()
        variants = (batch.lengths.numpy() > LONG).astype(U64)[sequence]
        hidden = embed(batch.ids.numpy(), positions, variants)
        span = int(positions.max()) + 1
        tables = [t.numpy().astype(np.int64) * cache.block_size for t in batch.tables]
        offsets = np.arange(cache.block_size)
        seen = [mask(positions, span, group.window) for group in cache.groups]
        for layer, memory in enumerate(cache.memory):
            g = layer % len(cache.groups)
            memory[batch.slots[g].numpy()] = hidden
            places = (tables[g][:, :, None] + offsets).reshape(len(tables[g]), -1)[:, :span]
            weighted = memory[places] * FACTORS[:span]
            part = np.where(seen[g], weighted[sequence], U64(0))
            hidden = mix(hidden + part.sum(axis=1, dtype=U64))
        return torch.from_numpy(hidden[batch.rows.numpy()].view(np.int64))

    def logits(self, hidden: Tensor) -> Tensor:
        assert len(hidden) % self.multiple == 0
        return torch.from_numpy(table_of_logits(hidden.numpy().view(U64)))


def mask(positions: NDArray[np.int64], span: int, window: int | None) -> NDArray[np.bool_]:
    """[tokens, span]: what a token sees."""
    behind = positions[:, None] - np.arange(span)
    return (behind >= 0) & (behind < (window or CONTEXT))


def logits_alone(
    tokens: list[int], given: int, windows: tuple[int | None, ...]
) -> NDArray[np.float32]:
    """[tokens, VOCABULARY]: what the decoder says to a text without a cache, in one go."""
    positions = np.arange(len(tokens))
    hidden = embed(np.array(tokens), positions, np.full(len(tokens), variant(given), U64))
    for window in windows * 2:
        seen = mask(positions, len(tokens), window)
        part = np.where(seen, hidden * FACTORS[: len(tokens)], U64(0))
        hidden = mix(hidden + part.sum(axis=1, dtype=U64))
    return table_of_logits(hidden)


def pick(logits: NDArray[np.float32], request: Request, index: int, position: int) -> int:
    """A choice that depends on everything noise may depend on, so that forks diverge."""
    assert request.sampling is not None
    turn = hash((request.sampling.seed, index, position)) if index else 0
    return (int(logits.argmax()) + turn) % VOCABULARY


def fake_sampler(logits: Tensor, sequences: "list[Sequence]") -> list[Choice | None]:
    pairs = zip(logits.numpy(), sequences, strict=True)
    return [Choice(pick(r, s.request, s.index, len(s.tokens)), None) for r, s in pairs]


def alone(request: Request, index: int = 0, windows: tuple[int | None, ...] = (None,)) -> list[int]:
    """The output of a generation that ends by length, one token at a time without a cache."""
    assert request.sampling is not None
    tokens = list(request.prompt)
    for _ in range(request.sampling.max_tokens):
        row = logits_alone(tokens, len(request.prompt), windows)[-1]
        tokens.append(pick(row, request, index, len(tokens)))
    return tokens[len(request.prompt) :]


def engine_with(
    blocks: int = 64,
    block_size: int = 4,
    limits: Limits | None = None,
    *,
    windows: tuple[int | None, ...] = (None,),
    decoder: FakeDecoder | None = None,
    eos: tuple[int, ...] = (),
    reuse: bool = True,
    decode: Decode | None = None,
    sampler: Sampler = fake_sampler,
) -> Engine:
    """blocks: in each group, beside the null block."""
    groups = tuple(CacheGroup(window, blocks + 1) for window in windows)
    return Engine(
        LocalRunner(decoder or FakeDecoder(), FakeCache(groups, block_size)),
        facts(eos),
        limits,
        decode=decode,
        reuse=reuse,
        sampler=sampler,
    )


def facts(eos: tuple[int, ...] = ()) -> ModelFacts:
    return ModelFacts(CONTEXT, VOCABULARY, eos, "fake", variant)
