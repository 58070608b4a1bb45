"""One block of the decoder: attention and MLP, the norms around them, and the residual."""

from dataclasses import dataclass

from torch import Tensor

from compress.runtime.decoder.attention import Angles, Attention
from compress.runtime.decoder.kv import KVCache
from compress.runtime.decoder.latent import LatentAttention
from compress.runtime.decoder.mlp import Mixture, Mlp
from compress.runtime.decoder.norms import Norm, through
from compress.runtime.engine.batch import FlatBatch


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """attention_in, mlp_in: norms of what is read. attention_out, mlp_out: of what is added."""

    attention: Attention | LatentAttention
    mlp: Mlp | Mixture
    attention_in: Norm | None
    attention_out: Norm | None
    mlp_in: Norm | None
    mlp_out: Norm | None
    parallel: bool

    def __call__(
        self, x: Tensor, batch: FlatBatch, cache: KVCache, angles: tuple[Angles, ...]
    ) -> Tensor:
        """The residual [T, hidden] behind the block."""
        seen = self.attention(through(self.attention_in, x), batch, cache, angles)
        seen = through(self.attention_out, seen)
        if self.parallel:
            return self.mlp(through(self.mlp_in, x), batch) + seen + x
        x = x + seen
        made = self.mlp(through(self.mlp_in, x), batch)
        return x + through(self.mlp_out, made)
