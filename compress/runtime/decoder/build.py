"""A checkpoint's weights -> the layers of a decoder."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compress.arch.forward.forward import ForwardSpec
from compress.arch.forward.kinds import Latent
from compress.arch.spec import BlockSpec, LinearSpec
from compress.runtime.decoder.activations import FUNCTIONS
from compress.runtime.decoder.attention import Attention
from compress.runtime.decoder.latent import LatentAttention, Unfolding
from compress.runtime.decoder.layer import DecoderLayer
from compress.runtime.decoder.linear import Joint, Linear, load_dense, load_linear, load_rows
from compress.runtime.decoder.mlp import Mixture, Mlp
from compress.runtime.decoder.norms import Norm
from compress.runtime.forms.block_rows import BlockRows
from compress.runtime.forms.dense import FloatWeight, dense_weight
from compress.runtime.forms.form import Arithmetic
from compress.runtime.forms.pairs import PairWeight

if TYPE_CHECKING:
    from compress.formats.weights import Weights

# What tokens are looked up in.
Embedding = FloatWeight | PairWeight | BlockRows


@dataclass(frozen=True, slots=True, eq=False)
class Loader:
    """Reads what layers need, onto one device. Only weights of products may keep their dtype."""

    weights: "Weights"
    how: ForwardSpec
    arithmetic: Arithmetic

    @property
    def dtype(self) -> torch.dtype:
        return self.arithmetic.dtype

    @property
    def device(self) -> torch.device:
        return self.arithmetic.device

    def tensor(self, name: str) -> Tensor:
        return self.weights.read(name, check_finite=True).to(self.device, self.dtype)

    def norm(self, path: str, eps: float | None = None) -> Norm:
        """The norm at a path of the checkpoint. eps: the decoder's where it is None."""
        weight, bias = self.tensor(f"{path}.weight"), None
        if self.weights.stored_in(f"{path}.bias") is not None:
            bias = self.tensor(f"{path}.bias")
        if self.how.norm_late:
            weight = weight.float() + self.how.norm_offset
        eps = self.how.eps if eps is None else eps
        return Norm(weight, bias, eps, self.how.norm == "layer", self.how.norm_late)

    def linear(self, spec: LinearSpec) -> Linear:
        return load_linear(self.weights, spec, self.arithmetic)

    def kept(self, spec: LinearSpec) -> Tensor:
        """A weight that is more than multiplied with, in the dtype in which it is kept."""
        return load_dense(self.weights, spec, self.arithmetic)

    def embedding(self, spec: LinearSpec, tied: bool) -> Embedding:
        """tied: it is the head, too, so products read it."""
        rows = load_rows(self.weights, spec, self.arithmetic)
        if rows is not None:
            return rows
        kept = self.kept(spec)
        return dense_weight(kept, self.arithmetic) if tied else FloatWeight(kept)

    def head(self, spec: LinearSpec | None, embedding: Embedding) -> Linear:
        """spec: of a head with a weight of its own; None where it is the embedding, whose blocks
        lie once more in panels then."""
        if spec is not None:
            return self.linear(spec)
        if isinstance(embedding, BlockRows):
            return self.linear(self.weights.spec.embedding_linear())
        return Linear(embedding)

    def layer(self, block: BlockSpec, rotation: int | None) -> DecoderLayer:
        """rotation: of the decoder's, which of them this block has."""
        by_role = {x.role: x for x in block.linears if x.expert is None}
        names = self.how.norms
        return DecoderLayer(
            attention=self._either_attention(block, by_role, rotation),
            mlp=self._mlp(block, by_role),
            attention_in=self._norm(block, names.attention_in),
            attention_out=self._norm(block, names.attention_out),
            mlp_in=self._norm(block, names.mlp_in),
            mlp_out=self._norm(block, names.mlp_out),
            parallel=self.how.parallel,
        )

    def _norm(self, block: BlockSpec, name: str | None) -> Norm | None:
        return None if name is None else self.norm(f"{block.prefix}.{name}")

    def _either_attention(
        self, block: BlockSpec, by_role: Mapping[str, LinearSpec], rotation: int | None
    ) -> Attention | LatentAttention:
        how = self.how.layers[block.index]
        if isinstance(how, Latent):
            return self._latent(how, block, by_role, rotation)
        return self._attention(block, by_role, rotation)

    def _latent(
        self,
        how: Latent,
        block: BlockSpec,
        by_role: Mapping[str, LinearSpec],
        rotation: int | None,
    ) -> LatentAttention:
        prefix, norms, unfolded = block.prefix, self.how.norms, by_role["kv_b"]
        queries = None
        if how.query_rank is not None:
            norm = self.norm(f"{prefix}.{norms.query_latent}", how.eps)
            queries = norm, self.linear(by_role["q_b"])
        parts = tuple(self.linear(by_role[x]) for x in ("q", "q_a", "kv_a") if x in by_role)
        sizes = (how.query_rank or how.heads * how.key_width, how.rank + how.rotated)
        weight, inputs = self.kept(unfolded), self.weights.activation(unfolded.name)
        return LatentAttention(
            how=how,
            layer=block.index,
            group=self.how.group(block.index),
            entering=Joint.of(parts, sizes),
            queries=queries,
            norm=self.norm(f"{prefix}.{norms.kv_latent}", how.eps),
            unfolding=Unfolding.of(weight, how, self.arithmetic, inputs),
            out=self.linear(by_role["o"]),
            rotation=rotation,
        )

    def _attention(
        self, block: BlockSpec, by_role: Mapping[str, LinearSpec], rotation: int | None
    ) -> Attention:
        how, norms = self.how.grouped(block.index), self.how.norms
        parts = tuple(self.linear(by_role[x]) for x in ("q", "k", "v", "qkv") if x in by_role)
        widths = (sum(how.widths),) if how.qkv == "heads" else how.widths
        return Attention(
            how=how,
            layer=block.index,
            group=self.how.group(block.index),
            qkv=Joint.of(parts, widths),
            out=self.linear(by_role["o"]),
            q_norm=self._norm(block, norms.q),
            k_norm=self._norm(block, norms.k),
            rotation=rotation,
            rounding=self.weights.cache(block),
        )

    def _mlp(self, block: BlockSpec, by_role: Mapping[str, LinearSpec]) -> Mlp | Mixture:
        if "router" not in by_role:
            return self._dense(by_role)
        experts: dict[int, dict[str, LinearSpec]] = {}
        for linear in block.linears:
            if linear.expert is not None:
                experts.setdefault(linear.expert, {})[linear.role] = linear
        return Mixture(
            router=self.linear(by_role["router"]),
            experts=tuple(self._dense(experts[number]) for number in sorted(experts)),
            chosen=self.how.experts_per_token,
            normalised=self.how.norm_topk,
        )

    def _dense(self, by_role: Mapping[str, LinearSpec]) -> Mlp:
        down = by_role["down"]
        parts = tuple(self.linear(by_role[x]) for x in ("gate", "up", "gate_up") if x in by_role)
        inner = Joint.of(parts, (down.shape[1],) * (1 + self.how.gated))
        return Mlp(inner, self.linear(down), FUNCTIONS[self.how.activation])
