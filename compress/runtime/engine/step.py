"""What one step computes, and how it is put together."""

from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from compress.runtime.engine.batch import TextChunk
from compress.runtime.sequences.sequence import Sequence
from compress.runtime.sequences.tables import Copy


class Item(NamedTuple):
    """The tokens of a sequence at the positions from `start` to `end`.

    The logits of the positions from `wanted` on are asked, which may be none of them.
    """

    sequence: Sequence
    start: int
    end: int
    wanted: int

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.end - self.start

    @property
    def chunk(self) -> TextChunk:
        sequence, start, end, wanted = self
        ids = sequence.tokens[start:end]
        return TextChunk(ids, start, wanted, sequence.tables, sequence.given)


class Step(NamedTuple):
    """copies: to be made in this order before any token's keys and values are written."""

    items: tuple[Item, ...]
    copies: tuple[Copy, ...]
    preempted: tuple[Sequence, ...]


@dataclass(slots=True)
class Draft:
    """A step in the making. copies: of those that need any. stalled: a sequence found no room and
    waits with what it has."""

    budget: int
    items: dict[Sequence, Item] = field(default_factory=dict)
    copies: dict[Sequence, list[Copy]] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    stalled: bool = False

    @property
    def crowded(self) -> bool:
        """Running sequences lacked blocks, so nobody new is let in."""
        return self.stalled or bool(self.preempted)

    def add(self, sequence: Sequence, count: int, copies: list[Copy]) -> None:
        start = sequence.computed
        end = start + count
        self.items[sequence] = Item(sequence, start, end, min(sequence.needed, end))
        if copies:
            self.copies[sequence] = copies
        self.budget -= count

    def drop(self, sequence: Sequence) -> None:
        """The sequence was preempted; its copies with it, as their targets may be given anew."""
        item = self.items.pop(sequence, None)
        self.copies.pop(sequence, None)
        self.budget += item.tokens if item is not None else 0
        self.preempted.append(sequence)

    def finish(self) -> Step:
        copies = tuple(chain.from_iterable(self.copies.values()))
        return Step(tuple(self.items.values()), copies, tuple(self.preempted))
