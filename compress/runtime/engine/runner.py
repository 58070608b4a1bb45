"""Steps that are computed here: by a decoder and its cache in this process."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Generic

from torch import Tensor

from compress.runtime.engine.batch import TextChunk
from compress.runtime.engine.interfaces import Cache, DecoderLike, StepInput, StepLayout
from compress.runtime.sampling.sampling import Best


@dataclass(frozen=True, slots=True, eq=False)
class LocalRunner(Generic[Cache]):
    """A StepRunner. cache: of the decoder's kind. best: a greedy step of this decoder and cache,
    where there is a shorter way to it than over all logits; None for chunks that have none."""

    decoder: DecoderLike[Cache]
    cache: Cache
    best: Callable[[Several[TextChunk]], Best | None] | None = None

    @property
    def layout(self) -> StepLayout:
        return StepLayout(self.cache.groups, self.cache.block_size, self.decoder.multiple)

    def run(self, step: StepInput) -> Iterator[Tensor] | Best:
        for copy in step.copies:
            self.cache.copy(*copy)
        best = self.best(step.chunks) if step.greedy and self.best is not None else None
        if best is not None:
            return best
        hidden = self.decoder.forward(step.batch.to(self.decoder.device), self.cache)
        starts = range(0, len(hidden), step.rows)
        return (self.decoder.logits(hidden[at : at + step.rows]) for at in starts)
