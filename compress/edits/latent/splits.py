"""How a budget of numbers a token may be split into a latent and a rotated key."""

from compress.edits.latent.rotation import Choice
from compress.edits.latent.source import SourceAttention

# Shares of a budget that the rotated key gets, of which one is chosen.
SHARES = (0.125, 0.1875, 0.25, 0.375, 0.5)


def splits_of(
    attention: SourceAttention, whole: int, rope: Choice, multiple_of: int
) -> list[tuple[int, int]]:
    """Rank and rope_dim of each split that spends a budget of `whole` numbers; none where that is
    less than a latent and a key. Ranks are multiples of `multiple_of`."""
    found = list[tuple[int, int]]()
    for share in SHARES:
        rotated = _fitting(attention, rope, min(share * whole, attention.keys))
        rank = min(whole - rotated, attention.values) // multiple_of * multiple_of
        rotated = _fitting(attention, rope, min(whole - rank, attention.keys))
        if rotated and rank > 0:
            found.append((rank, rotated))
    return list(dict.fromkeys(found))


def _fitting(attention: SourceAttention, rope: Choice, wanted: float) -> int:
    """The largest rope_dim that is not above what is wanted, and that `rope` takes."""
    count = attention.rope.dim // 2
    fits: dict[str, range | list[int]] = {
        "stride": [x for x in range(1, count + 1) if count % x == 0],
        "top": range(1, count + 1),
        "any": range(1, attention.keys // 2 + 1),
    }
    return max((2 * x for x in fits[rope] if 2 * x <= wanted), default=0)
