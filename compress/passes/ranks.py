"""Several processes that make one result together, as a pass sees them.

Each rank has the whole plan, a share of the calibration rows, and every block in turn. What is
summed over rows is summed over ranks, what is decided of a layer is decided by one rank and told to
all, and a unit is recorded when all have flushed what they wrote of it. Passes ask for no more than
this, so how many ranks there are changes no algorithm; one rank is the case where nothing is sent.
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
        """Of this process, from 0 on. Rank 0 keeps the journal."""

    @property
    def size(self) -> int:
        """How many there are."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what all ranks give, the same bits on each. x: of one shape and dtype; it may
        be used up."""

    def broadcast(self, value: T | None, source: int) -> T:
        """What rank `source` gives, on all: a tensor, or a record with tensors, which then lie on
        each rank's own device. value: not looked at on the other ranks."""

    def barrier(self) -> None:
        """Return when all ranks are here."""


@dataclass(frozen=True, slots=True)
class OneRank:
    """A process by itself."""

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
    """The largest of each element over all ranks; NaN where any has it."""
    seen = x.new_zeros(ranks.size, *x.shape)
    seen[ranks.rank] = x
    return ranks.sum(seen).amax(dim=0)


def decided(ranks: Ranks, decide: Callable[[], T]) -> T:
    """What rank 0 decides, on all ranks."""
    return ranks.broadcast(decide() if ranks.rank == 0 else None, 0)


def dealt(ranks: Ranks, items: Sequence[Item], work: Callable[[Item], T]) -> Iterator[T]:
    """What `work` makes of every item, in order and on all ranks; each item is one rank's work.

    An item is begun when its turn comes, not before: of one rank nothing is held for later.
    """
    for start in range(0, len(items), ranks.size):
        mine = start + ranks.rank
        made = work(items[mine]) if mine < len(items) else None
        for owner in range(min(ranks.size, len(items) - start)):
            yield ranks.broadcast(made if owner == ranks.rank else None, owner)


def summed_count(ranks: Ranks, count: int) -> int:
    """The sum of a number over all ranks."""
    return int(ranks.sum(torch.tensor([count], dtype=torch.int64)))
