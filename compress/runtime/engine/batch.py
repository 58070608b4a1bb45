"""The tokens of one step, of many sequences, side by side."""

from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from itertools import chain
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
    groups = range(len(chunks[0].blocks))
    slots: list[list[int]] = [[] for _ in groups]
    for index, chunk in enumerate(chunks):
        start, end, before = chunk.start, chunk.start + len(chunk.ids), len(ids)
        rows += range(before + chunk.wanted - start, before + end - start)
        ids += chunk.ids
        places += range(start, end)
        owners += [index] * (end - start)
        for into, blocks in zip(slots, chunk.blocks, strict=True):
            into += slots_of(blocks, start, end, block_size)
    count, none = len(ids), [0] * (-len(ids) % multiple)
    rows += [0] * (-len(rows) % multiple)
    given = [*(chunk.given for chunk in chunks), 0]
    # One array for all: of one text, making each took longer than filling it.
    parts = [ids + none, places + none, rows, given, *(of + none for of in slots)]
    whole = torch.from_numpy(np.array(list(chain.from_iterable(parts)), np.int64))
    flat, positions, wanted, lengths, *stored = whole.split_with_sizes(list(map(len, parts)))
    return FlatBatch(
        ids=flat,
        positions=positions,
        sequence=torch.from_numpy(np.array(owners + [len(chunks)] * len(none), np.int32)),
        tables=tuple(torch.from_numpy(_table(chunks, group)) for group in groups),
        slots=tuple(stored),
        rows=wanted,
        count=count,
        multiple=multiple,
        lengths=lengths,
    )


def slots_of(blocks: Several[int], start: int, end: int, size: int) -> list[int]:
    """Where keys and values of positions from start to end go, as FlatBatch.slots."""
    found: list[int] = []
    if end == start + 1:
        # Of nearly all texts of a step; the way below takes three times as long.
        return [blocks[start // size] * size + start % size]
    while start < end:
        block, offset = divmod(start, size)
        first, count = blocks[block] * size + offset, min(size - offset, end - start)
        found += range(first, first + count)
        start += count
    return found


def _table(chunks: Several[TextChunk], group: int) -> "np.typing.NDArray[np.int32]":
    """[chunks + 1, most blocks], the null block behind each and in the last row."""
    tables = [chunk.blocks[group] for chunk in chunks]
    table = np.zeros((len(chunks) + 1, max(map(len, tables))), np.int32)
    for row, blocks in zip(table, tables, strict=False):
        row[: len(blocks)] = blocks
    return table
