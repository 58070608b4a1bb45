"""The tokens of one step, of many sequences, side by side."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """T rows, a multiple of 16, of S sequences; the rows from `count` on are padding.

    ids, positions: int64 [T]; 0 in padding.
    sequence: int32 [T], the row of the tables that a token belongs to; of padding any row.
    tables: a table for each group of layers with one window (ForwardSpec.windows):
        int32 [S, most blocks], the blocks of a sequence in order, 0 (the null block) behind them.
    slots: for each group int64 [T], block * block size + offset, where a token's keys and values
        go; in padding 0, which is in the null block.
    rows: int64 [R], which of the T rows go to the head, filled up to a multiple of 16 with 0.
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
    lengths: Tensor
