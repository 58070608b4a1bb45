"""Whether this machine gives a token the same bits whatever is beside it, tried when a model opens.

Matrix products on any rows (compiled code) or multiples of 16 (torch's) do so in the libraries that
were tried; nothing promises it for the next one, another processor or a GPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.kv import KVCache
from compress.runtime.engine.batch import FlatBatch, TextChunk, build_batch
from compress.runtime.engine.interfaces import DecoderLike
from compress.runtime.loading.tiled import Tiled
from compress_kernels.ops.linear import ROWS

# Tokens of the text that is compared, and the seconds that the largest step may take.
LENGTH, SECONDS = 24, 1.0
_SMALL = 64

Native = DecoderLike[KVCache]
# Number of a text, its tokens, the position of the first.
Chunk = tuple[int, Sequence[int], int]


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """decoder: the one given, or with other rows a step. rows: the steps that were compared.

    notice: in one line what was found, None where all bits were equal at once.
    """

    decoder: Native
    rows: tuple[int, ...]
    notice: str | None


def check_bits(decoder: Decoder, most: int, stored: torch.dtype | None = None) -> Checked:
    """Compares logits bit by bit; where they differ fills steps up to multiples of 16 rows, and
    where they still do takes tiles of 16.

    most: tokens of a step, at most; as many are tried as take about a second. stored: dtype of keys
    and values, the decoder's where it is None.
    """
    most, stored = min(most, decoder.spec.context or most), stored or decoder.dtype
    equal, rows = _equal(decoder, decoder, most, stored)
    if equal:
        return Checked(decoder, rows, None)
    seen = f"steps of {' and '.join(map(str, rows))} rows gave a token different bits here, so"
    for tried, remedy in _remedies(decoder):
        if _equal(decoder, tried, most, stored)[0]:
            return Checked(tried, rows, f"{seen} {remedy}: slower, but repeatable")
    return Checked(
        decoder,
        rows,
        "this machine gives a token different bits beside different neighbours, in tiles of 16 rows"
        " too: outputs can depend on what else is served",
    )


def _remedies(decoder: Decoder) -> Iterator[tuple[Native, str]]:
    """Other ways to compute, and what they are, the cheapest first."""
    if decoder.multiple < ROWS:
        yield replace(decoder, multiple=ROWS), "steps are filled up to multiples of 16 rows"
    yield Tiled(decoder), "all is computed in tiles of 16 rows"


def _equal(
    decoder: Decoder, tried: Native, most: int, stored: torch.dtype
) -> tuple[bool, tuple[int, ...]]:
    """Whether the text gets the same bits alone, in chunks and beside others; the steps' rows."""
    length = min(LENGTH, most)
    ids = [(7919 * i + 13) % decoder.spec.vocab for i in range(length)]
    runs = _Runs(decoder, tried, length + most, stored)
    start = perf_counter()
    whole = runs.logits([(0, ids, 0)])[0]
    seconds = perf_counter() - start
    large = int(length * SECONDS / seconds) // ROWS * ROWS
    sizes = sorted({min(size, most) for size in (_SMALL, max(_SMALL, large))})
    middle = length // 3
    found = [torch.cat([runs.logits([(0, ids[i : i + 1], i)])[0] for i in range(middle)])]
    for size in sizes:
        others = [ids[i % length] for i in range(max(1, size - length))]
        found.append(runs.logits([(1, others, 0), (0, ids, 0)])[1])
        runs.logits([(0, ids[:middle], 0)])
        found.append(runs.logits([(0, ids[middle:], middle), (1, others, 0)])[0])
    expected = [whole[:middle], *([whole, whole[middle:]] * len(sizes))]
    equal = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return equal, (tried.multiple, *sizes)


class _Runs:
    """Two texts in a cache of their own, which lies in blocks of all it can hold."""

    def __init__(self, decoder: Decoder, tried: Native, most: int, stored: torch.dtype) -> None:
        self.tried, self.most, self.groups = tried, most, len(decoder.how.windows)
        self.cache = KVCache(
            decoder.how, [3] * self.groups, most, dtype=stored, device=decoder.device
        )

    def logits(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """[tokens, vocabulary] of each chunk, all in one step."""
        batch = self._batch(chunks)
        found = self.tried.logits(self.tried.forward(batch, self.cache))
        return list(torch.split(found[: batch.count], [len(ids) for _, ids, _ in chunks]))

    def _batch(self, chunks: Sequence[Chunk]) -> FlatBatch:
        given = (LENGTH, self.most)
        found = [
            TextChunk(ids, start, start, ((1 + text,),) * self.groups, given[text])
            for text, ids, start in chunks
        ]
        return build_batch(found, self.most, self.tried.multiple).to(self.tried.device)
