"""Texts through the engine's decoder, in chunks of any size, several in one batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.kv import KVCache
from compress.runtime.engine.batch import FlatBatch, TextChunk, build_batch
from compress_kernels.panels import Math


def load(folder: Path, dtype: torch.dtype = torch.float32, math: Math = "exact") -> Decoder:
    return Decoder.load(open_weights(Checkpoint.open(folder)), dtype=dtype, math=math)


# Number of a text, some tokens of it, the position of the first, tokens of its prompt.
Chunk = tuple[int, Sequence[int], int, int]


@dataclass(slots=True)
class Runs:
    """Up to `texts` texts of `most` tokens, each with its blocks in an order of its own."""

    decoder: Decoder
    texts: int
    most: int
    block_size: int = 4
    cache: KVCache = field(init=False)
    tables: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        each = -(-self.most // self.block_size)
        groups = len(self.decoder.how.windows)
        self.cache = KVCache(
            self.decoder.how,
            [self.texts * each + 1] * groups,
            self.block_size,
            dtype=self.decoder.dtype,
            device=self.decoder.device,
        )
        order = torch.randperm(self.texts * each, generator=torch.Generator().manual_seed(7))
        self.tables = (order + 1).view(self.texts, each).tolist()

    def step(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Logits of all tokens of the chunks, [tokens, vocab] each."""
        batch = self.batch(chunks)
        logits = self.decoder.logits(self.decoder.forward(batch, self.cache))[: batch.count]
        return list(logits.split([len(tokens) for _, tokens, _, _ in chunks]))

    def batch(self, chunks: Sequence[Chunk], rows: Sequence[int] | None = None) -> FlatBatch:
        """rows: those that are asked, all of them when left out."""
        batch = build_batch(self.chunks(chunks), self.block_size, self.decoder.multiple)
        if rows is None:
            return batch
        missing = [0] * (-len(rows) % batch.multiple)
        return replace(batch, rows=torch.tensor([*rows, *missing]))

    def chunks(self, chunks: Sequence[Chunk]) -> list[TextChunk]:
        groups = len(self.decoder.how.windows)
        return [
            TextChunk(tokens, start, start, (self.tables[number],) * groups, prompt)
            for number, tokens, start, prompt in chunks
        ]

    def whole(self, ids: Sequence[int], number: int = 0) -> Tensor:
        """Logits of a text in one step, [tokens, vocab]."""
        return self.step([(number, ids, 0, len(ids))])[0]

    def greedy(self, prompt: Sequence[int], count: int, number: int = 0) -> list[int]:
        """The prompt and the most likely `count` tokens after it, one step each."""
        ids = list(prompt)
        logits = self.whole(ids, number)
        for _ in range(count):
            ids.append(int(logits[-1].argmax()))
            (logits,) = self.step([(number, ids[-1:], len(ids) - 1, len(prompt))])
        return ids
