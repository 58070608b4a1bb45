"""What attention over blocks is given: keys and values, and where tokens stand."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StoredStates:
    """Keys and values of one layer, in blocks.

    keys: [blocks, kv_heads, block size, key width], values: [blocks, kv_heads, block size, value
    width], floats, or int8 with the scales, fp16 [blocks, kv_heads, block size]; floats have none.
    Values may be the first numbers of the keys, `keys[..., :width]`, and then have their scales.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @property
    def shared(self) -> bool:
        """Whether values lie in the keys' memory, as their first numbers."""
        keys, values = self.keys, self.values
        start = values.data_ptr() == keys.data_ptr() and values.shape[3] <= keys.shape[3]
        return start and values.stride() == keys.stride() and values.shape[:3] == keys.shape[:3]


@dataclass(frozen=True, slots=True, eq=False)
class TokenPlaces:
    """Where T tokens of S sequences stand.

    table: int32 [S, most blocks], the blocks of each sequence in order. sequence: int32 [T], rows
    of the table. positions: int64 [T].
    """

    table: Tensor
    sequence: Tensor
    positions: Tensor
