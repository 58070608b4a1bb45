"""What a decoder has to do for each token, as numbers: products, attention, keys and values."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from compress.arch.spec import LinearSpec

Part = Literal["block", "expert", "head"]


@dataclass(frozen=True, slots=True)
class Product:
    """Matrix products of one shape that the engine carries out in one way.

    shape: (N, K) of the weight. part: "block" is computed for every token, "expert" for those that
    were sent to it, "head" for those whose logits are asked. stored: "dense", or the scheme of its
    codes in words. count: of them in the model. nbytes: of one weight as the engine keeps it.
    sample: one of those that are kept as codes; None where they are dense.
    """

    shape: tuple[int, int]
    part: Part
    stored: str
    count: int
    nbytes: int
    sample: LinearSpec | None = None

    @property
    def weights(self) -> int:
        """Numbers in one weight."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, slots=True)
class Workload:
    """A decoder in the dtype that it computes in.

    other_bytes: of tensors that stay in memory and are not read whole in a step (embeddings).
    windows: of each layer, None for all positions. state_bytes: of one token's keys and values in
    one layer. experts, chosen: of a mixture, else 0.
    """

    products: tuple[Product, ...]
    other_bytes: int
    windows: tuple[int | None, ...]
    heads: int
    kv_heads: int
    head_dim: int
    state_bytes: int
    experts: int = 0
    chosen: int = 0

    @property
    def weight_bytes(self) -> int:
        """In memory."""
        return self.other_bytes + sum(p.count * p.nbytes for p in self.products)

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers, while none has left the token behind its window."""
        return len(self.windows) * self.state_bytes

    def seen(self, length: int) -> int:
        """Positions that the last token of a text of so many sees, itself included, in all layers
        together."""
        return sum(length if w is None else min(length, w) for w in self.windows)

    def kv_bytes(self, length: int) -> int:
        """Keys and values of a text of so many tokens."""
        return self.state_bytes * self.seen(length)

    def pairs(self, start: int, end: int) -> int:
        """Tokens times the positions they see, in all layers, for the tokens [start, end)."""
        return sum(_seen_before(end, w) - _seen_before(start, w) for w in self.windows)


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one step of the engine has to do.

    tokens: that are computed, of so many sequences. wanted: rows whose logits are asked. Attention,
    in all layers together: single, positions seen by tokens that are their text's only one in the
    step; several, those seen by the tokens of longer chunks; states, positions whose keys and
    values are read, once for a chunk.
    """

    tokens: float
    sequences: float
    wanted: float
    single: float
    several: float
    states: float


def decode_load(work: Workload, batch: int, length: int) -> StepLoad:
    """One new token for each of `batch` texts of `length` tokens, that token included."""
    seen = batch * work.seen(length)
    return StepLoad(batch, batch, batch, seen, 0, seen)


def prompt_load(work: Workload, start: int, end: int, wanted: int = 0) -> StepLoad:
    """The tokens [start, end) of one text."""
    count = end - start
    states = sum(end if w is None else min(end, w - 1 + count) for w in work.windows)
    pairs = work.pairs(start, end)
    return StepLoad(count, 1, wanted, 0, pairs, states)


def prompt_loads(work: Workload, length: int, most: int) -> Iterable[StepLoad]:
    """The steps in which a prompt alone is read, at most `most` tokens in each."""
    for start in range(0, length, most):
        end = min(start + most, length)
        yield prompt_load(work, start, end, wanted=int(end == length))


def touched(work: Workload, tokens: float) -> float:
    """Experts of a layer that at least one of the tokens goes to, when each chooses at random."""
    if not work.experts:
        return 0.0
    missed: float = (1 - work.chosen / work.experts) ** tokens
    return work.experts * (1 - missed)


def _seen_before(position: int, window: int | None) -> int:
    """Positions seen by the tokens [0, position), of one layer."""
    growing = position if window is None else min(position, window)
    return growing * (growing + 1) // 2 + (position - growing) * growing
