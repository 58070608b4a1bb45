"""What attention over blocks is given: keys and values, and where tokens stand."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StoredStates:
    """Keys and values of one layer, in blocks.

    keys: [blocks, kv_heads, block size, key width], values: [blocks, kv_heads, block size, value
    width], floats, or int8 with the scales, fp16 [blocks, kv_heads, block size]; floats have none.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenPlaces:
    """Where T tokens of S sequences stand.

    table: int32 [S, most blocks], the blocks of each sequence in order. sequence: int32 [T], rows
    of the table. positions: int64 [T].
    """

    table: Tensor
    sequence: Tensor
    positions: Tensor
