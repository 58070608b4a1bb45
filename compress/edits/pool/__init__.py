"""Ways to make one head of keys and values of several."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from compress.edits.pool import align, plain, principal
from compress.edits.pool.evidence import HeadEvidence, SharedHead, key_energy, value_energy
from compress.edits.pool.partition import partition

Pool = Callable[[HeadEvidence, Sequence[int]], SharedHead]

POOLS: Mapping[str, Pool] = MappingProxyType(
    {
        "pca": principal.pool,
        "align": align.pool,
        "mean": plain.mean,
        "first": plain.first,
    }
)


def chosen_groups(seen: HeadEvidence, groups: int) -> tuple[tuple[int, ...], ...]:
    """The heads that share, by what scores and outputs lose when they do: each as a share of what
    all heads give."""
    keys, values = key_energy(seen) or 1.0, value_energy(seen) or 1.0

    def cost(members: tuple[int, ...]) -> float:
        of_keys, of_values = principal.lost(seen, members)
        return of_keys / keys + of_values / values

    return partition(seen.heads, seen.heads // groups, cost)
