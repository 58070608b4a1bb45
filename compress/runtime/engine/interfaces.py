"""What the engine needs of a decoder and of its cache; any pair that offers this will do."""

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from compress.runtime.engine.batch import FlatBatch
from compress.runtime.sequences.tables import CacheGroup


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
        """Batches have multiples of so many rows: the bits of a row do not change with them."""

    def forward(self, batch: FlatBatch, cache: Taken) -> Tensor:
        """Writes keys and values of all tokens; returns the last hidden states [R, width]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, width], a multiple of so many rows, too -> fp32 [rows, vocabulary]."""
