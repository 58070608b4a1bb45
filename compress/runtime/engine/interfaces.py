"""What the engine needs of whatever computes its steps: one call, with all that a step is in it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from compress.runtime.engine.batch import FlatBatch, TextChunk, build_batch
from compress.runtime.sampling.sampling import Best
from compress.runtime.sequences.tables import CacheGroup, Copy


@dataclass(frozen=True, slots=True)
class StepLayout:
    """How a step is laid out for a runner.

    groups, block_size: of its cache. multiple: batches have multiples of so many rows; the bits of
    a row do not change with them.
    """

    groups: tuple[CacheGroup, ...]
    block_size: int
    multiple: int


class StepInput(NamedTuple):
    """copies: of blocks, in this order, before any token's keys and values are written. layout: the
    runner's. rows: of logits that are wanted at once, at most; a multiple of the layout's. greedy:
    of logits the highest are all that is wanted."""

    copies: tuple[Copy, ...]
    chunks: tuple[TextChunk, ...]
    layout: StepLayout
    rows: int
    greedy: bool = False

    @property
    def batch(self) -> FlatBatch:
        """The chunks side by side, on the CPU; made when it is asked for."""
        return build_batch(self.chunks, self.layout.block_size, self.layout.multiple)


class StepRunner(Protocol):
    """Holds the weights, and the keys and values; the engine touches neither.

    What a step needs is in its input and what comes of it in its output, so a runner may be another
    process, or many ranks that each get the same input.
    """

    @property
    def layout(self) -> StepLayout:
        """Always the same."""

    def run(self, step: StepInput) -> Iterator[Tensor] | Best:
        """Logits of the batch's `rows`, padding included: fp32 [up to step.rows, vocabulary] at a
        time, in order. Of a greedy step their highest instead, where the runner takes them itself.

        When it returns, blocks are copied and the keys and values of all tokens written; logits may
        be made when they are taken. The next step comes when they are taken, or given up for an
        error: then every running text is computed anew.
        """


class CacheLike(Protocol):
    """Keys and values in blocks."""

    @property
    def block_size(self) -> int: ...

    @property
    def groups(self) -> tuple[CacheGroup, ...]: ...

    def copy(self, source: int, target: int, group: int) -> None:
        """Copies a block, in all layers of a group."""


Cache = TypeVar("Cache", bound=CacheLike)
Taken = TypeVar("Taken", bound=CacheLike, contravariant=True)


class DecoderLike(Protocol[Taken]):
    """What computes, with a cache of its kind."""

    @property
    def device(self) -> torch.device: ...

    @property
    def multiple(self) -> int:
        """As StepLayout's."""

    def forward(self, batch: FlatBatch, cache: Taken) -> Tensor:
        """Writes keys and values of all tokens; returns the last hidden states [R, width]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, width], a multiple of so many rows, too -> fp32 [rows, vocabulary]."""
