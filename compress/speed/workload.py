"""What a decoder has to do for each token, as numbers: products, attention, keys and values."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from compress.arch.spec import LinearSpec

Part = Literal["block", "expert", "head"]


@dataclass(frozen=True, slots=True)
class Product:
    """Matrix products of one shape that the engine carries out in one way.

    shape: (N, K) of the weight. part: "block" is computed for every token, "expert" for those that
    were sent to it, "head" for those whose logits are asked. stored: "dense", or the scheme of its
    codes in words, behind "decoded" where they are dense in memory. count: of them in the model.
    nbytes: of one weight as the engine keeps it. sample: one of the linears, or a part of one where
    several are one product; None where none is at hand. experts: of a layer, for those of a
    mixture.
    """

    shape: tuple[int, int]
    part: Part
    stored: str
    count: int
    nbytes: int
    sample: LinearSpec | None = field(default=None, compare=False)
    experts: int = 0

    @property
    def weights(self) -> int:
        """Numbers in one weight."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Layers in which a token costs alike for each position that it sees.

    windows: of each of these layers, None for all positions. products: multiplications of one token
    with one position, in one layer. state_bytes: of what one token leaves in the cache of one.
    sample: the number of the first of them.
    """

    windows: tuple[int | None, ...]
    products: int
    state_bytes: int
    sample: int = 0

    def seen(self, length: int) -> int:
        """Positions that the last token of a text of so many sees, itself included, in all these
        layers together."""
        return sum(length if w is None else min(length, w) for w in self.windows)

    def pairs(self, start: int, end: int) -> int:
        """Tokens times the positions they see, in all these layers, for the tokens [start, end)."""
        return sum(_seen_before(end, w) - _seen_before(start, w) for w in self.windows)

    def read(self, start: int, end: int) -> int:
        """Positions that any of the tokens [start, end) sees, in all these layers."""
        return sum(end if w is None else min(end, w - 1 + end - start) for w in self.windows)


@dataclass(frozen=True, slots=True)
class Workload:
    """A decoder in the dtype that it computes in.

    other_bytes: of tensors that stay in memory and are not read whole in a step (embeddings).
    attention: of all layers, those that cost alike together. chosen: experts of a token, 0 without
    a mixture.
    """

    products: tuple[Product, ...]
    other_bytes: int
    attention: tuple[AttentionWork, ...]
    chosen: int = 0

    @property
    def weight_bytes(self) -> int:
        """In memory."""
        return self.other_bytes + sum(p.count * p.nbytes for p in self.products)

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers, while none has left the token behind its window."""
        return sum(len(part.windows) * part.state_bytes for part in self.attention)

    def kv_bytes(self, length: int) -> int:
        """Keys and values of a text of so many tokens."""
        return sum(part.state_bytes * part.seen(length) for part in self.attention)


@dataclass(frozen=True, slots=True)
class Looks:
    """How much is looked at in a step, in some layers together.

    single: positions seen by tokens that are their text's only one in the step. several: those seen
    by the tokens of longer chunks. states: positions whose keys and values are read, once for a
    chunk.
    """

    single: float = 0
    several: float = 0
    states: float = 0


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one step of the engine has to do.

    tokens: that are computed, of so many sequences. wanted: rows whose logits are asked. looks: of
    each part of the workload's attention.
    """

    tokens: float
    sequences: float
    wanted: float
    looks: tuple[Looks, ...]


def decode_load(work: Workload, batch: int, length: int) -> StepLoad:
    """One new token for each of `batch` texts of `length` tokens, that token included."""
    seen = (batch * part.seen(length) for part in work.attention)
    return StepLoad(batch, batch, batch, tuple(Looks(count, 0, count) for count in seen))


def prompt_load(work: Workload, start: int, end: int, wanted: int = 0) -> StepLoad:
    """The tokens [start, end) of one text."""
    looks = (Looks(0, part.pairs(start, end), part.read(start, end)) for part in work.attention)
    return StepLoad(end - start, 1, wanted, tuple(looks))


def prompt_loads(work: Workload, length: int, most: int) -> Iterable[StepLoad]:
    """The steps in which a prompt alone is read, at most `most` tokens in each."""
    for start in range(0, length, most):
        end = min(start + most, length)
        yield prompt_load(work, start, end, wanted=int(end == length))


def touched(experts: int, chosen: int, tokens: float) -> float:
    """Experts of a layer that at least one of the tokens goes to, when each chooses at random."""
    missed: float = (1 - chosen / experts) ** tokens
    return experts * (1 - missed)


def _seen_before(position: int, window: int | None) -> int:
    """Positions seen by the tokens [0, position), of one layer."""
    growing = position if window is None else min(position, window)
    return growing * (growing + 1) // 2 + (position - growing) * growing
