"""Steps that are computed here: by a decoder and its cache in this process."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

from torch import Tensor

from compress.runtime.engine.interfaces import Cache, DecoderLike, StepInput, StepLayout


@dataclass(frozen=True, slots=True, eq=False)
class LocalRunner(Generic[Cache]):
    """A StepRunner. cache: of the decoder's kind."""

    decoder: DecoderLike[Cache]
    cache: Cache

    @property
    def layout(self) -> StepLayout:
        return StepLayout(self.cache.groups, self.cache.block_size, self.decoder.multiple)

    def run(self, step: StepInput) -> Iterator[Tensor]:
        for copy in step.copies:
            self.cache.copy(*copy)
        hidden = self.decoder.forward(step.batch.to(self.decoder.device), self.cache)
        starts = range(0, len(hidden), step.rows)
        return (self.decoder.logits(hidden[at : at + step.rows]) for at in starts)
