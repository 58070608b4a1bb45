"""One layer's attention over the cache."""

from dataclasses import dataclass

from torch import Tensor

from compress.arch.forward.forward import AttentionForward
from compress.quant.activations import fake_quantize
from compress.quant.tensor import InputQuantization
from compress.runtime.decoder.hadamard import spread
from compress.runtime.decoder.kv import KVCache
from compress.runtime.decoder.linear import Joint, Linear
from compress.runtime.decoder.norms import Norm, through
from compress.runtime.engine.batch import FlatBatch
from compress_kernels.ops.attention import paged_attention
from compress_kernels.ops.rows import rotate
from compress_kernels.paged import TokenPlaces

Angles = tuple[Tensor, Tensor]  # cosine and sine, [T, pairs]


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """layer: its number. group: of the cache. rotation: which of a step's angles, None for none.

    by_head: q, k and v of a head lie together in the fused output, not all of q first.
    whole_norms: q_norm and k_norm are of all heads together. rounding: of keys and of values before
    they are stored, by scales that the checkpoint has.
    """

    how: AttentionForward
    layer: int
    group: int
    head_dim: int
    qkv: Joint
    out: Linear
    by_head: bool
    q_norm: Norm | None
    k_norm: Norm | None
    whole_norms: bool
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
            k, v = fake_quantize(k, self.rounding[0]), fake_quantize(v, self.rounding[1])
        if cache.key_scales[self.layer] is not None:
            q, k = spread(q), spread(k)
        cache.write(self.layer, k, v, batch.slots[self.group])
        out = paged_attention(
            q,
            cache.stored(self.layer),
            TokenPlaces(batch.tables[self.group], batch.sequence, batch.positions),
            scale=self.how.scale,
            window=self.how.window,
            softcap=self.how.softcap,
        )
        return self.out(out.flatten(1))

    def _states(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, normed but not rotated: [T, heads of each, head_dim]."""
        parts = self.qkv(x)
        if self.by_head:
            q, k, v = parts[0].view(len(x), -1, 3, self.head_dim).unbind(-2)
            return q, k, v
        norms = (self.q_norm, self.k_norm, None)
        if self.whole_norms:
            parts = tuple(through(norm, x) for norm, x in zip(norms, parts, strict=True))
        heads = tuple(part.view(len(x), -1, self.head_dim) for part in parts)
        if not self.whole_norms:
            heads = tuple(through(norm, x) for norm, x in zip(norms, heads, strict=True))
        return heads[0], heads[1], heads[2]
