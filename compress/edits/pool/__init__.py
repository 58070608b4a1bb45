"""Ways to make one head of keys and values of several."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from compress.edits.pool import align, normed, plain, principal
from compress.edits.pool.evidence import HeadEvidence, SharedHead, key_energy, value_energy
from compress.edits.pool.partition import partition

Pool = Callable[[HeadEvidence, Sequence[int]], SharedHead]


@dataclass(frozen=True, slots=True)
class WayToPool:
    """pool: of heads as they are. behind_norm: of heads with a norm over each; None where there is
    no such thing. keys: what makes the keys then: a fit to what they shall be, the mean of what
    made them, or that of one head."""

    pool: Pool
    behind_norm: Pool | None
    keys: Literal["fit", "mean", "one"] = "one"

    def of(self, seen: HeadEvidence) -> Pool:
        """The one for these heads."""
        if not seen.normed:
            return self.pool
        assert self.behind_norm is not None, "refused in the plan"
        return self.behind_norm


POOLS: Mapping[str, WayToPool] = MappingProxyType(
    {
        "pca": WayToPool(principal.pool, normed.pool, "fit"),
        "align": WayToPool(align.pool, None),
        "mean": WayToPool(plain.mean, plain.mean, "mean"),
        "first": WayToPool(plain.first, plain.first),
    }
)


def chosen_groups(seen: HeadEvidence, groups: int) -> tuple[tuple[int, ...], ...]:
    """The heads that share, by what scores and outputs lose when they do: each as a share of what
    all heads give."""
    keys, values = key_energy(seen) or 1.0, value_energy(seen) or 1.0
    lost = normed.lost if seen.normed else principal.lost

    def cost(members: tuple[int, ...]) -> float:
        of_keys, of_values = lost(seen, members)
        return of_keys / keys + of_values / values

    return partition(seen.heads, seen.heads // groups, cost)
