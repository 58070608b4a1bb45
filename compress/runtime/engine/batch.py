"""The tokens of one step, of many sequences, side by side."""

from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """T rows of S sequences; the rows from `count` on are padding.

    multiple: T and R are multiples of it, as the decoder asked.

    ids, positions: int64 [T]; 0 in padding.
    sequence: int32 [T], the row of the tables that a token belongs to; of padding any row.
    tables: a table for each group of layers with one window (ForwardSpec.windows):
        int32 [S, most blocks], the blocks of a sequence in order, 0 (the null block) behind them.
    slots: for each group int64 [T], block * block size + offset, where a token's keys and values
        go; in padding 0, which is in the null block.
    rows: int64 [R], which of the T rows go to the head, filled up with 0.
    lengths: int64 [S], tokens of the prompt a sequence came with. Rotary embeddings whose
        frequencies depend on the length of a text (longrope, dynamic) go by it.
    """

    ids: Tensor
    positions: Tensor
    sequence: Tensor
    tables: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]
    rows: Tensor
    count: int
    multiple: int
    lengths: Tensor

    def to(self, device: torch.device) -> "FlatBatch":
        """The same there; itself where it is there already."""
        if self.ids.device == device:
            return self
        return replace(
            self,
            ids=self.ids.to(device),
            positions=self.positions.to(device),
            sequence=self.sequence.to(device),
            tables=tuple(table.to(device) for table in self.tables),
            slots=tuple(slots.to(device) for slots in self.slots),
            rows=self.rows.to(device),
            lengths=self.lengths.to(device),
        )


class TextChunk(NamedTuple):
    """Tokens of one text that a step computes.

    start: the position of the first. wanted: the position from which on logits are asked. blocks:
    the text's, in order, for each group. given: tokens that the text came with.
    """

    ids: Several[int]
    start: int
    wanted: int
    blocks: Several[Several[int]]
    given: int


def build_batch(chunks: Several[TextChunk], block_size: int, multiple: int) -> FlatBatch:
    """The batch of one or more chunks, in their order, on the CPU; padding has a row of the tables
    of its own.

    `rows` are the wanted positions, chunk by chunk, each in ascending order.
    """
    ids: list[int] = []
    places: list[int] = []
    owners: list[int] = []
    rows: list[int] = []
    for index, chunk in enumerate(chunks):
        count = len(chunk.ids)
        rows += range(len(ids) + chunk.wanted - chunk.start, len(ids) + count)
        ids += chunk.ids
        places += range(chunk.start, chunk.start + count)
        owners += [index] * count
    count, padding = len(ids), -len(ids) % multiple
    rows += [0] * (-len(rows) % multiple)
    positions = np.array(places + [0] * padding, np.int64)
    sequence = np.array(owners + [len(chunks)] * padding, np.int32)
    tables = [_table(chunks, group) for group in range(len(chunks[0].blocks))]
    block, offset = positions // block_size, positions % block_size
    slots = [table[sequence, block] * np.int64(block_size) + offset for table in tables]
    given = [chunk.given for chunk in chunks]
    return FlatBatch(
        ids=torch.from_numpy(np.array(ids + [0] * padding, np.int64)),
        positions=torch.from_numpy(positions),
        sequence=torch.from_numpy(sequence),
        tables=tuple(map(torch.from_numpy, tables)),
        slots=tuple(map(torch.from_numpy, slots)),
        rows=torch.from_numpy(np.array(rows, np.int64)),
        count=count,
        multiple=multiple,
        lengths=torch.from_numpy(np.array([*given, 0], np.int64)),
    )


def _table(chunks: Several[TextChunk], group: int) -> "np.typing.NDArray[np.int32]":
    """[chunks + 1, most blocks], the null block behind each and in the last row."""
    tables = [chunk.blocks[group] for chunk in chunks]
    table = np.zeros((len(chunks) + 1, max(map(len, tables))), np.int32)
    for row, blocks in zip(table, tables, strict=False):
        row[: len(blocks)] = blocks
    return table
