"""What a token leaves behind in a layer, for those after it to read."""

from dataclasses import dataclass
from typing import NamedTuple


class HeadShape(NamedTuple):
    """Shape of what one token leaves in one part of a cache.

    heads: number of heads. width: numbers in each.
    """

    heads: int
    width: int


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one token leaves in the cache of a layer. It stays there while a window sees the token.

    parts: one tensor [heads, width] each: keys, and values. A kind of layer that reads both from
    one latent has one part; a kind that keeps nothing of a single token has none.
    values: of a layer of one part, how many of its first numbers are the values.
    """

    parts: tuple[HeadShape, ...]
    values: int = 0

    @property
    def numbers(self) -> int:
        """Numbers that one token leaves, in all parts."""
        return sum(part.heads * part.width for part in self.parts)

    def nbytes(self, width: int, scale: int = 0) -> int:
        """Bytes of one token. width: bytes of a number. scale: bytes of the scale that each head of
        each part has beside its numbers; 0 without scales."""
        return self.numbers * width + scale * sum(part.heads for part in self.parts)


def keys_and_values(heads: int, key_width: int, value_width: int) -> LayerCache:
    """The cache of a layer that keeps keys and values in the same number of heads."""
    return LayerCache((HeadShape(heads, key_width), HeadShape(heads, value_width)))


def latent_cache(rank: int, rotated: int) -> LayerCache:
    """The cache of latent attention: for all heads one latent of `rank` numbers, the values, and
    one rotated key behind it."""
    return LayerCache((HeadShape(1, rank + rotated),), values=rank)
