"""The tokens of one step, of many sequences, side by side."""

from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compress.runtime.engine.step import Item


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


def build_batch(
    items: Several[Item], groups: int, block_size: int, device: torch.device, multiple: int
) -> FlatBatch:
    """The batch of one or more items, in their order; padding has a row of the tables of its own.

    `rows` are the wanted positions, item by item, each in ascending order.
    """
    ids: list[int] = []
    places: list[int] = []
    owners: list[int] = []
    rows: list[int] = []
    for index, item in enumerate(items):
        rows += range(len(ids) + item.wanted - item.start, len(ids) + item.count)
        ids += item.sequence.tokens[item.start : item.end]
        places += range(item.start, item.end)
        owners += [index] * item.count
    count, padding = len(ids), -len(ids) % multiple
    rows += [0] * (-len(rows) % multiple)
    positions = np.array(places + [0] * padding, np.int64)
    sequence = np.array(owners + [len(items)] * padding, np.int32)
    tables = [_table(items, group) for group in range(groups)]
    block, offset = positions // block_size, positions % block_size
    slots = [table[sequence, block] * np.int64(block_size) + offset for table in tables]
    given = [item.sequence.given for item in items]

    def tensor(values: "np.typing.NDArray[np.generic]") -> Tensor:
        return torch.from_numpy(values).to(device)

    return FlatBatch(
        ids=tensor(np.array(ids + [0] * padding, np.int64)),
        positions=tensor(positions),
        sequence=tensor(sequence),
        tables=tuple(map(tensor, tables)),
        slots=tuple(map(tensor, slots)),
        rows=tensor(np.array(rows, np.int64)),
        count=count,
        multiple=multiple,
        lengths=tensor(np.array([*given, 0], np.int64)),
    )


def _table(items: Several[Item], group: int) -> "np.typing.NDArray[np.int32]":
    """[items + 1, most blocks], the null block behind each and in the last row."""
    tables = [item.sequence.tables[group] for item in items]
    table = np.zeros((len(items) + 1, max(map(len, tables))), np.int32)
    for row, blocks in zip(table, tables, strict=False):
        row[: len(blocks)] = np.frombuffer(blocks, np.int32)
    return table
