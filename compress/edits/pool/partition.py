"""Which heads share: the partition into groups of one size with the least joint cost.

All partitions are tried where they are few. Else a group costs what its pairs cost together, and
heads are swapped between groups as long as that helps, from several random partitions.
"""

from collections.abc import Callable, Iterator
from itertools import combinations
from math import comb, factorial

import torch
from torch import Tensor

Group = tuple[int, ...]
Cost = Callable[[Group], float]

# Groups whose cost is taken, and partitions that are all tried: 8 heads by twos have 28 and 105, by
# fours 70 and 35; 16 by fours 1,820 and 2.6 million.
SUBSETS, PARTITIONS = 256, 10_000
RESTARTS = 16


def partition(heads: int, size: int, cost: Cost) -> tuple[Group, ...]:
    """Groups of `size` of all heads, each ascending, in the order of their first heads."""
    assert heads % size == 0, "groups of unequal sizes"
    if size in (1, heads):
        return tuple(tuple(range(a, a + size)) for a in range(0, heads, size))
    count = factorial(heads) // (factorial(size) ** (heads // size) * factorial(heads // size))
    if comb(heads, size) <= SUBSETS and count <= PARTITIONS:
        costs = {group: cost(group) for group in combinations(range(heads), size)}
        return min(_all(tuple(range(heads)), size), key=lambda x: sum(costs[group] for group in x))
    return _by_pairs(heads, size, cost)


def _all(heads: Group, size: int) -> Iterator[tuple[Group, ...]]:
    """Every partition once."""
    if not heads:
        yield ()
        return
    first, others = heads[0], heads[1:]
    for rest in combinations(others, size - 1):
        left = tuple(x for x in others if x not in rest)
        for more in _all(left, size):
            yield ((first, *rest), *more)


def _by_pairs(heads: int, size: int, cost: Cost) -> tuple[Group, ...]:
    """The best of several climbs by the costs of pairs."""
    pairs = torch.zeros(heads, heads, dtype=torch.float64)
    for a, b in combinations(range(heads), 2):
        pairs[a, b] = pairs[b, a] = cost((a, b))
    generator = torch.Generator().manual_seed(0)
    adjacent = torch.arange(heads) // size
    starts = [adjacent, *(adjacent[_shuffled(heads, generator)] for _ in range(RESTARTS))]
    best = min((_climbed(pairs, start) for start in starts), key=lambda x: _total(pairs, x))
    groups = [tuple(torch.where(best == g)[0].tolist()) for g in range(heads // size)]
    return tuple(sorted(groups))


def _shuffled(count: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(count, generator=generator)


def _total(pairs: Tensor, of: Tensor) -> float:
    return float(pairs[of[:, None] == of].sum())


def _climbed(pairs: Tensor, of: Tensor) -> Tensor:
    """Swap the two heads that gain most, until none do. of: int64 [H], the group of each head."""
    of = of.clone()
    groups, rows = int(of.max()) + 1, torch.arange(len(of))
    while True:
        within = pairs @ torch.nn.functional.one_hot(of, groups).double()  # [H, G]
        own = within[rows, of]
        into = within[:, of]  # [h, j]: of h with the group of j
        change = into + into.T - own[:, None] - own - 2 * pairs
        change.masked_fill_(of[:, None] == of, 0.0)
        least = int(change.argmin())
        a, b = divmod(least, len(of))
        if not change[a, b] < -1e-12 * float(own.abs().sum()):
            return of
        of[a], of[b] = of[b].clone(), of[a].clone()
