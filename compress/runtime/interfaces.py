"""What the engine needs of a decoder and of its cache; any pair that offers this will do."""

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from compress.runtime.batch import FlatBatch
from compress.runtime.tables import CacheGroup


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

    def forward(self, batch: FlatBatch, cache: Taken) -> Tensor:
        """Writes keys and values of all tokens; returns the last hidden states [R, width]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, width], a multiple of 16 rows -> fp32 [rows, vocabulary]."""
