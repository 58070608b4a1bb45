"""A decoder that is given 16 rows at a time, whatever the step has."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Generic

import torch
from torch import Tensor

from compress.runtime.engine.batch import FlatBatch
from compress.runtime.engine.interfaces import DecoderLike, Taken
from compress_kernels.ops.linear import ROWS


@dataclass(frozen=True, slots=True, eq=False)
class Tiled(Generic[Taken]):
    """Every matrix product has 16 rows then, so their number cannot change a row's bits.

    All weights are read once for 16 rows: a step of 64 costs four. Tiles go in order, so the keys
    and values of earlier tokens of a text are there when later ones look for them.
    """

    decoder: DecoderLike[Taken]

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def multiple(self) -> int:
        return ROWS

    def forward(self, batch: FlatBatch, cache: Taken) -> Tensor:
        parts = [self.decoder.forward(tile, cache) for tile in _tiles(batch)]
        return torch.cat(parts)[batch.rows]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.cat([self.decoder.logits(tile) for tile in torch.split(hidden, ROWS)])


def _tiles(batch: FlatBatch) -> Iterator[FlatBatch]:
    """The same rows, 16 at a time, and all of them asked."""
    everything = torch.arange(ROWS, device=batch.ids.device)
    for start in range(0, len(batch.ids), ROWS):
        part = slice(start, start + ROWS)
        yield replace(
            batch,
            ids=batch.ids[part],
            positions=batch.positions[part],
            sequence=batch.sequence[part],
            slots=tuple(slots[part] for slots in batch.slots),
            rows=everything,
            count=min(ROWS, batch.count - start),
            multiple=ROWS,
        )
