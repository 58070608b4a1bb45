"""Keys and values of all sequences, in blocks that the block tables share out."""

import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from compress.arch.forward.forward import ForwardSpec
from compress.arch.layer_cache import LayerCache
from compress.runtime.sequences.tables import CacheGroup
from compress_kernels.ops.states import store_states
from compress_kernels.paged import StoredStates

# Of the scale that a head of a token has in int8, in fp16.
SCALE_BYTES = 2


class KVCache:
    """Layers that see the same positions share a group, and so the numbers of their blocks.

    states: for each layer a tensor [blocks, heads, block size, width] of each part of its
    LayerCache. Block 0 of each group is the null block, into which padding is written.
    scales: for each of them in int8 one fp16 scale for each token and head, [blocks, heads, block
    size], else None. Memory is taken as blocks are written.
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
        self.block_size, self.dtype = block_size, dtype
        self.groups = tuple(
            CacheGroup(window, count) for window, count in zip(spec.windows, blocks, strict=True)
        )
        self._group_of = tuple(spec.group(layer) for layer in range(len(spec.layers)))
        self._caches = caches = [layer.cache() for layer in spec.layers]
        self.states = tuple(
            tuple(
                _zeros((blocks[group], part.heads, block_size, part.width), dtype, device)
                for part in cache.parts
            )
            for group, cache in zip(self._group_of, caches, strict=True)
        )
        self.scales = tuple(tuple(map(_scales, states)) for states in self.states)
        self.bytes_per_token = cache_bytes(caches, dtype)

    def nbytes(self, blocks: Sequence[int]) -> int:
        """Of so many blocks of each group, in all layers."""
        each = (cache_bytes([cache], self.dtype) for cache in self._caches)
        counted = zip(self._group_of, each, strict=True)
        return self.block_size * sum(blocks[group] * size for group, size in counted)

    def write(self, layer: int, parts: Sequence[Tensor], slots: Tensor) -> None:
        """parts: [T, heads, width] each, of the layer's cache. slots: int64 [T], block * block size
        + offset."""
        stored = zip(parts, self.states[layer], self.scales[layer], strict=True)
        for part, states, scales in stored:
            store_states(part, states, slots, scales)

    def keys_and_values(self, layer: int) -> StoredStates:
        """What attention reads of a layer that keeps both, or a latent that is both."""
        if len(self.states[layer]) == 1:
            (keys,), (scales,) = self.states[layer], self.scales[layer]
            values = keys[..., : self._caches[layer].values]
            return StoredStates(keys, values, scales, scales)
        (keys, values), (key_scales, value_scales) = self.states[layer], self.scales[layer]
        return StoredStates(keys, values, key_scales, value_scales)

    def copy(self, source: int, target: int, group: int) -> None:
        """Copies a block, in all layers of a group."""
        for layer, its_group in enumerate(self._group_of):
            if its_group == group:
                for states in (*self.states[layer], *self.scales[layer]):
                    if states is not None:
                        states[target].copy_(states[source])


def cache_bytes(caches: Iterable[LayerCache], dtype: torch.dtype) -> int:
    """That one token takes in some layers together. dtype: fp32, bf16, fp16 or int8."""
    scale = SCALE_BYTES if dtype == torch.int8 else 0
    return sum(cache.nbytes(dtype.itemsize, scale) for cache in caches)


def _scales(states: Tensor) -> Tensor | None:
    if states.dtype != torch.int8:
        return None
    return _zeros(states.shape[:3], torch.float16, states.device)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU pages that the system fills when they are first written: torch's zeros would write
    all of a cache, of which most texts use little, before the first token. Large pages where the
    system has them: blocks lie anywhere, and each small page would have to be looked up."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    # Of its own process alone: pages that processes may share are small by default.
    pages = mmap.mmap(-1, prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)
