"""One layer's latent attention over the cache, which holds latents and nothing that heads make of
them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.arch.forward.kinds import Latent
from compress.quant.tensor import InputQuantization
from compress.runtime.decoder.attention import Angles
from compress.runtime.decoder.heads import HeadLinears
from compress.runtime.decoder.kv import KVCache
from compress.runtime.decoder.linear import Joint, Linear
from compress.runtime.decoder.norms import Norm
from compress.runtime.engine.batch import FlatBatch
from compress.runtime.forms.form import Arithmetic
from compress.runtime.forms.input_rounding import rounded
from compress_kernels.ops.attention import paged_attention
from compress_kernels.ops.rows import rotate, spread
from compress_kernels.paged import TokenPlaces


@dataclass(frozen=True, slots=True, eq=False)
class Unfolding:
    """What heads make of a latent, as products that need no key and no value of any token.

    keys: of each head [rank, nope], from its queries to what they ask of latents. values: of each
    head [value width, rank], from a sum of latents to that of its values. inputs: how latents are
    rounded before, None for not at all.
    """

    keys: HeadLinears
    values: HeadLinears
    inputs: InputQuantization | None

    @classmethod
    def of(
        cls,
        weight: Tensor,
        how: Latent,
        arithmetic: Arithmetic,
        inputs: InputQuantization | None,
    ) -> "Unfolding":
        """weight: [heads * (nope + value width), rank], as Loader.kept gives it."""
        heads = weight.view(how.heads, how.nope + how.value_width, how.rank)
        keys, values = heads[:, : how.nope].transpose(1, 2), heads[:, how.nope :]
        return cls(HeadLinears.of(keys, arithmetic), HeadLinears.of(values, arithmetic), inputs)


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    """layer: its number. group: of the cache. rotation: which of a step's angles, None for none.

    entering: of queries, or of the latent that `queries` and its norm make them of, and of the
    latent of keys and values with the rotated key.
    """

    how: Latent
    layer: int
    group: int
    entering: Joint
    queries: tuple[Norm, Linear] | None
    norm: Norm
    unfolding: Unfolding
    out: Linear
    rotation: int | None

    def __call__(
        self, x: Tensor, batch: FlatBatch, cache: KVCache, angles: tuple[Angles, ...]
    ) -> Tensor:
        """x: [T, hidden] -> the same shape. Latents of all tokens are in the cache then."""
        q, latents = self._states(x, angles)
        turned = cache.dtype == torch.int8
        if turned:
            q, latents = self._spread(q), self._spread(latents)
        cache.write(self.layer, (latents,), batch.slots[self.group])
        seen = paged_attention(
            q,
            cache.keys_and_values(self.layer),
            TokenPlaces(batch.tables[self.group], batch.sequence, batch.positions),
            scale=self.how.scale,
        )
        # The Hadamard matrix is its own inverse.
        return self.out(self.unfolding.values(spread(seen) if turned else seen).flatten(1))

    def _states(self, x: Tensor, angles: tuple[Angles, ...]) -> tuple[Tensor, Tensor]:
        """What queries ask of latents and rotated keys, [T, heads, rank + rotated], and these,
        [T, 1, rank + rotated]."""
        how = self.how
        q, latent = self.entering(x)
        if self.queries is not None:
            norm, linear = self.queries
            q = linear(norm(q))
        q, q_turned = torch.split(q.view(len(x), how.heads, -1), [how.nope, how.rotated], -1)
        latent, k_turned = torch.split(latent[:, None], [how.rank, how.rotated], -1)
        latent = self.norm(latent)
        if self.unfolding.inputs is not None:
            latent = rounded(latent, self.unfolding.inputs)
        if self.rotation is not None:
            q_turned, k_turned = (self._rotate(part, angles) for part in (q_turned, k_turned))
        asked = self.unfolding.keys(q)
        return torch.cat((asked, q_turned), -1), torch.cat((latent, k_turned), -1)

    def _rotate(self, x: Tensor, angles: tuple[Angles, ...]) -> Tensor:
        """x: [T, heads, rotated]."""
        assert self.rotation is not None, "nothing is rotated"
        return rotate(x, *angles[self.rotation], interleaved=self.how.interleaved)

    def _spread(self, x: Tensor) -> Tensor:
        """Latents stay apart from rotated keys, as values are latents."""
        latent, turned = torch.split(x, [self.how.rank, self.how.rotated], -1)
        return torch.cat((spread(latent), spread(turned)), -1)
