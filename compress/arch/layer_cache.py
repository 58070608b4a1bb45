"""What a token leaves behind in a layer, for those after it to read."""

from dataclasses import dataclass
from typing import NamedTuple


class HeadShape(NamedTuple):
    """heads: that are kept of a token. width: numbers of each."""

    heads: int
    width: int


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one token leaves in the cache of a layer, as long as a window sees it.

    parts: a tensor [heads, width] each: keys and values. A kind of layer that reads both from one
    latent has one part, a kind that keeps no single tokens has none.
    """

    parts: tuple[HeadShape, ...]

    @property
    def numbers(self) -> int:
        return sum(part.heads * part.width for part in self.parts)

    def nbytes(self, width: int, scale: int = 0) -> int:
        """width: bytes of a number. scale: bytes of what each head of each part has beside."""
        return self.numbers * width + scale * sum(part.heads for part in self.parts)


def keys_and_values(heads: int, key_width: int, value_width: int) -> LayerCache:
    return LayerCache((HeadShape(heads, key_width), HeadShape(heads, value_width)))
