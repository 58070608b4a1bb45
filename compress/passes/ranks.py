"""Ranks: several processes that make one result together, as a pass sees them.

Each rank has the whole plan and a share of the calibration rows, and runs every block in turn. A
sum over rows is summed over the ranks too. One rank decides about a layer and tells the others. A
unit is recorded when all ranks have flushed what they wrote of it. Passes ask for no more than
this, so the number of ranks changes no algorithm. With one rank nothing is sent.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Item = TypeVar("Item")


class Ranks(Protocol):
    """What ranks do together. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0 to size - 1. Rank 0 keeps the journal."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks, with the same bits on each.

        x: of the same shape and dtype on every rank. It may be overwritten.
        """

    def broadcast(self, value: T | None, source: int) -> T:
        """The value of rank `source`, on every rank.

        value: a tensor, or a record with tensors; they arrive on each rank's own device. On other
        ranks than `source` it is not read.
        """

    def barrier(self) -> None:
        """Wait until all ranks have called this."""


@dataclass(frozen=True, slots=True)
class OneRank:
    """A single process: it keeps what it has."""

    rank: int = 0
    size: int = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, value: T | None, source: int) -> T:
        assert value is not None, "only another rank has nothing to tell"
        return value

    def barrier(self) -> None:
        return


ONE_RANK: Ranks = OneRank()


def largest(ranks: Ranks, x: Tensor) -> Tensor:
    """The largest value of each element of x over all ranks; NaN where a rank has NaN.

    x: of the same shape and dtype on every rank.
    """
    seen = x.new_zeros(ranks.size, *x.shape)  # seen: [ranks, ...], a row of each rank
    seen[ranks.rank] = x
    return ranks.sum(seen).amax(dim=0)


def decided(ranks: Ranks, decide: Callable[[], T]) -> T:
    """Call `decide` on rank 0, and return its value on every rank."""
    return ranks.broadcast(decide() if ranks.rank == 0 else None, 0)


def dealt(ranks: Ranks, items: Sequence[Item], work: Callable[[Item], T]) -> Iterator[T]:
    """Deal items to the ranks; yield on every rank what `work` returns for each item, in order.

    Each rank works on one item at a time and begins the next when all ranks have finished theirs,
    so a single rank holds no results for later.
    """
    for start in range(0, len(items), ranks.size):
        mine = start + ranks.rank
        made = work(items[mine]) if mine < len(items) else None
        for owner in range(min(ranks.size, len(items) - start)):
            yield ranks.broadcast(made if owner == ranks.rank else None, owner)


def summed_count(ranks: Ranks, count: int) -> int:
    """The sum of a count over all ranks."""
    return int(ranks.sum(torch.tensor([count], dtype=torch.int64)))
