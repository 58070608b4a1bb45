"""Keys and values of all sequences, in blocks that the block tables share out."""

from collections.abc import Sequence
from math import prod
from mmap import mmap

import torch
from torch import Tensor

from compress.arch.forward.forward import ForwardSpec
from compress.runtime.sequences.tables import CacheGroup
from compress_kernels.ops.states import store_states
from compress_kernels.paged import StoredStates


class KVCache:
    """Layers that see the same positions share a group, and so the numbers of their blocks.

    keys, values: for each layer [blocks, kv_heads, block size, head_dim]. Block 0 of each group is
    the null block, into which padding is written. In int8, key_scales and value_scales hold one
    fp16 scale for each token and head, [blocks, kv_heads, block size] for each layer; else None.
    Memory is taken as blocks are written.
    bytes_per_token: of all layers, while none has left the token behind its window.
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
        """blocks: of each group of `spec.windows`, the null block included. dtype: fp32, bf16, fp16
        or int8."""
        self.block_size = block_size
        self.groups = tuple(
            CacheGroup(window, count) for window, count in zip(spec.windows, blocks, strict=True)
        )
        self._group_of = tuple(spec.group(layer) for layer in range(len(spec.layers)))
        shapes = [
            (blocks[group], spec.kv_heads, block_size, spec.head_dim) for group in self._group_of
        ]
        self.keys = tuple(_zeros(shape, dtype, device) for shape in shapes)
        self.values = tuple(_zeros(shape, dtype, device) for shape in shapes)
        self.key_scales = tuple(_scales(keys) for keys in self.keys)
        self.value_scales = tuple(_scales(values) for values in self.values)
        self.bytes_per_token = len(shapes) * bytes_of_layer(spec.kv_heads, spec.head_dim, dtype)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """k, v: [T, kv_heads, head_dim]. slots: int64 [T], block * block size + offset."""
        store_states(k, self.keys[layer], slots, self.key_scales[layer])
        store_states(v, self.values[layer], slots, self.value_scales[layer])

    def stored(self, layer: int) -> StoredStates:
        """What attention reads of a layer."""
        return StoredStates(
            self.keys[layer], self.values[layer], self.key_scales[layer], self.value_scales[layer]
        )

    def copy(self, source: int, target: int, group: int) -> None:
        """Copies a block, in all layers of a group."""
        for layer, its_group in enumerate(self._group_of):
            if its_group == group:
                for layers in (self.keys, self.values, self.key_scales, self.value_scales):
                    states = layers[layer]
                    if states is not None:
                        states[target].copy_(states[source])


def bytes_of_layer(kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """That one token's keys and values take in a layer."""
    return 2 * kv_heads * (head_dim * dtype.itemsize + 2 * (dtype == torch.int8))


def _scales(states: Tensor) -> Tensor | None:
    if states.dtype != torch.int8:
        return None
    return _zeros(states.shape[:3], torch.float16, states.device)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU pages that the system fills when they are first written: torch's zeros would write
    all of a cache, of which most texts use little, before the first token."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    pages = mmap(-1, prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)
