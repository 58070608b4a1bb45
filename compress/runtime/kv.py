"""Keys and values of all sequences, in blocks that the block tables share out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.arch.forward import ForwardSpec
from compress.runtime.tables import CacheGroup


class KVCache:
    """Layers that see the same positions share a group, and so the numbers of their blocks.

    keys, values: for each layer [blocks, kv_heads, block size, head_dim]. Block 0 of each group is
    the null block, into which padding is written.
    """

    def __init__(
        self,
        spec: ForwardSpec,
        blocks: Sequence[int],
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """blocks: of each group of `spec.windows`, the null block included."""
        self.block_size = block_size
        self.groups = tuple(
            CacheGroup(window, count) for window, count in zip(spec.windows, blocks, strict=True)
        )
        self._group_of = tuple(spec.group(layer) for layer in range(len(spec.layers)))
        shapes = [
            (blocks[group], spec.kv_heads, block_size, spec.head_dim) for group in self._group_of
        ]
        self.keys = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        self.values = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """k, v: [T, kv_heads, head_dim]. slots: int64 [T], block * block size + offset."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        self.keys[layer][blocks, :, offsets] = k.to(self.keys[layer].dtype)
        self.values[layer][blocks, :, offsets] = v.to(self.values[layer].dtype)

    def copy(self, source: int, target: int, group: int) -> None:
        """Copies a block, in all layers of a group."""
        for layer, its_group in enumerate(self._group_of):
            if its_group == group:
                for states in (self.keys[layer], self.values[layer]):
                    states[target].copy_(states[source])
