"""One layer's attention over the cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.arch.forward.kinds import Grouped
from compress.quant.tensor import InputQuantization
from compress.runtime.decoder.kv import KVCache
from compress.runtime.decoder.linear import Joint, Linear
from compress.runtime.decoder.norms import Norm, through
from compress.runtime.engine.batch import FlatBatch
from compress.runtime.forms.input_rounding import rounded
from compress_kernels.ops.attention import paged_attention
from compress_kernels.ops.rows import rotate, spread
from compress_kernels.paged import TokenPlaces

Angles = tuple[Tensor, Tensor]  # cosine and sine, [T, pairs]


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """layer: its number. group: of the cache. rotation: which of a step's angles, None for none.

    qkv: of one output where q, k and v of a head lie together in it, else of three.
    rounding: of keys and of values before they are stored, by scales that the checkpoint has.
    """

    how: Grouped
    layer: int
    group: int
    qkv: Joint
    out: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    rotation: int | None
    rounding: tuple[InputQuantization, InputQuantization] | None

    def __call__(
        self, x: Tensor, batch: FlatBatch, cache: KVCache, angles: tuple[Angles, ...]
    ) -> Tensor:
        """x: [T, hidden] -> the same shape. Keys and values of all tokens are in the cache then."""
        q, k, v = self._states(x)
        if self.rotation is not None:
            cos, sin = angles[self.rotation]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.rounding is not None:
            k, v = rounded(k, self.rounding[0]), rounded(v, self.rounding[1])
        if cache.dtype == torch.int8:
            q, k = spread(q), spread(k)
        cache.write(self.layer, (k, v), batch.slots[self.group])
        out = paged_attention(
            q,
            cache.keys_and_values(self.layer),
            TokenPlaces(batch.tables[self.group], batch.sequence, batch.positions),
            scale=self.how.scale,
            window=self.how.window,
            softcap=self.how.softcap,
        )
        return self.out(out.flatten(1))

    def _states(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, normed but not rotated: [T, heads of each, width]."""
        how, parts = self.how, self.qkv(x)
        widths = (how.key_width, how.key_width, how.value_width)
        if how.qkv == "heads":
            by_head = parts[0].view(len(x), how.heads, sum(widths))
            q, k, v = torch.split(by_head, list(widths), -1)
            return q, k, v
        norms = (self.q_norm, self.k_norm, None)
        if how.qk_norm == "full":
            parts = tuple(through(norm, x) for norm, x in zip(norms, parts, strict=True))
        heads = tuple(
            part.view(len(x), -1, width) for part, width in zip(parts, widths, strict=True)
        )
        if how.qk_norm != "full":
            heads = tuple(through(norm, x) for norm, x in zip(norms, heads, strict=True))
        return heads[0], heads[1], heads[2]
