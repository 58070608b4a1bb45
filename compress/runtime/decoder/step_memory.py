"""What a step brings to its program, written where the program reads it."""

import ctypes
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.runtime.engine.batch import TextChunk, slots_of
from compress.runtime.sequences.tables import CacheGroup

# A ctypes array. A few numbers are sooner written into it than into numpy's; mypy has it take lists
# alone, and it takes any sequence.
Numbers = Any


@dataclass(frozen=True, slots=True, eq=False)
class StepMemory:
    """A FlatBatch of up to `rows` tokens whose memory stays from step to step: of one text, making
    its tensors anew took longer than all else that Python does for a step.

    ids, positions, wanted: int64. sequence: int32. slots: of each group, int64. tables: of each
    group, int32 [rows, most blocks]; behind the blocks of a text is anything. written: their rows,
    into which an array's bytes are copied: 0.1 µs, where numpy takes 0.4.
    """

    rows: int
    block_size: int
    ids: Numbers
    positions: Numbers
    wanted: Numbers
    sequence: Numbers
    slots: tuple[Numbers, ...]
    tables: tuple[NDArray[np.int32], ...]
    written: tuple[tuple[memoryview, ...], ...]

    @classmethod
    def of(cls, rows: int, groups: Several[CacheGroup], block_size: int, most: int) -> "StepMemory":
        """most: positions of a text."""
        numbers, blocks = ctypes.c_int64 * rows, -(-most // block_size)
        ids, positions, wanted = numbers(), numbers(), numbers()
        sequence = (ctypes.c_int32 * rows)()
        slots = tuple(numbers() for _ in groups)
        tables = tuple(np.zeros((rows, min(blocks, x.blocks)), np.int32) for x in groups)
        written = tuple(tuple(row.data for row in table) for table in tables)
        return cls(rows, block_size, ids, positions, wanted, sequence, slots, tables, written)

    def values(self) -> Mapping[str, int]:
        """What a run of the program is given that stays as it is."""
        arrays = ("ids", "positions", "wanted", "sequence")
        values = {name: ctypes.addressof(getattr(self, name)) for name in arrays}
        for group, (places, table) in enumerate(zip(self.slots, self.tables, strict=True)):
            values[f"slots {group}"] = ctypes.addressof(places)
            values[f"table {group}"] = table.ctypes.data
            values[f"width {group}"] = table.shape[1]
        return values

    def write(self, chunks: Several[TextChunk]) -> tuple[int, int] | None:
        """How many tokens there are, and of how many logits are wanted. None for more tokens or
        longer texts than fit."""
        rows = asked = 0
        for index, (ids, start, wanted, blocks, _) in enumerate(chunks):
            count = len(ids)
            end, last, more = rows + count, start + count, start + count - wanted
            if end > self.rows:
                return None
            self.ids[rows:end] = ids
            self.sequence[rows:end] = (index,) * count
            if count == more == 1:
                self.positions[rows], self.wanted[asked] = start, rows
            else:
                self.positions[rows:end] = range(start, last)
                self.wanted[asked : asked + more] = range(end - more, end)
            for slots, tables, own in zip(self.slots, self.written, blocks, strict=True):
                table, length = tables[index], len(own)
                if length > len(table):
                    return None
                slots[rows:end] = slots_of(own, start, last, self.block_size)
                table[:length] = own if isinstance(own, array) else array("i", own)
            rows, asked = end, asked + more
        return rows, asked
