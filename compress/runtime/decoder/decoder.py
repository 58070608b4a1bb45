"""The decoder: a flat batch of tokens of many texts, through all layers at once.

Every row is computed by itself: matrix products run on any rows where compiled code does them, and
else on multiples of 16; attention and norms row by row; elementwise functions are those that give a
number one result wherever it lies. So what a text gets depends on nothing but the text.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compress.arch.forward.forward import ForwardSpec, describe_forward
from compress.arch.spec import DecoderSpec
from compress.runtime.decoder.attention import Angles
from compress.runtime.decoder.build import Embedding, Loader
from compress.runtime.decoder.kv import KVCache
from compress.runtime.decoder.layer import DecoderLayer
from compress.runtime.decoder.linear import Linear
from compress.runtime.decoder.norms import Norm, through
from compress.runtime.decoder.rope import Rotation
from compress.runtime.engine.batch import FlatBatch
from compress.runtime.forms.form import Arithmetic
from compress_kernels.ops.linear import row_multiple
from compress_kernels.panels import Math

if TYPE_CHECKING:
    from compress.formats.weights import Weights


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """Weights that stay on `device`, and how they compute, in `dtype`.

    multiple: of rows, that a batch has. embedding: [vocab, hidden], as dense weights are kept where
    a tied head shares it; in GGUF's blocks it lies beside a head in panels. positions:
    [context + offset, hidden] or None. rotations: the distinct
    ones, in the layers' order.
    """

    spec: DecoderSpec
    how: ForwardSpec
    dtype: torch.dtype
    device: torch.device
    multiple: int
    embedding: Embedding
    positions: Tensor | None
    rotations: tuple[Rotation, ...]
    layers: tuple[DecoderLayer, ...]
    final_norm: Norm | None
    head: Linear

    @classmethod
    def load(
        cls,
        weights: "Weights",
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        math: Math = "exact",
    ) -> "Decoder":
        """The decoder of an open checkpoint, dense or compressed.

        CheckpointError for a family or setting that is in no table of forwards, and for a tensor
        with NaN or infinity.
        """
        how = describe_forward(weights.checkpoint.config, weights.spec)
        return cls.of(Loader(weights, how, Arithmetic.here(dtype, device, math)))

    @classmethod
    def of(cls, loader: Loader) -> "Decoder":
        """Of what a loader makes."""
        spec, how = loader.weights.spec, loader.how
        ropes = how.ropes
        numbers = [None if x.rope is None else ropes.index(x.rope) for x in how.layers]
        head = spec.head_linear()
        embedding = loader.embedding(spec.embedding_linear(), tied=head is None)
        final = spec.final_norm
        return cls(
            spec=spec,
            how=how,
            dtype=loader.dtype,
            device=loader.device,
            multiple=row_multiple(loader.dtype, loader.device),
            embedding=embedding,
            positions=None if how.positions is None else loader.tensor(how.positions.tensor),
            rotations=tuple(Rotation.of(rope, loader.device) for rope in ropes),
            layers=tuple(
                loader.layer(block, number)
                for block, number in zip(spec.blocks, numbers, strict=True)
            ),
            final_norm=None if final is None else loader.norm(final.removesuffix(".weight")),
            head=loader.head(head, embedding),
        )

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, cache: KVCache) -> Tensor:
        """Hidden states behind the final norm, [R, hidden], of the batch's `rows`.

        Keys and values of all its tokens are in the cache afterwards.
        """
        hidden = self.embed(batch)
        angles = self.angles(batch)
        for layer in self.layers:
            hidden = layer(hidden, batch, cache, angles)
        return through(self.final_norm, hidden[batch.rows])

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> fp32 [rows, vocabulary]."""
        logits = self.head(hidden).float()
        cap = self.how.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def embed(self, batch: FlatBatch) -> Tensor:
        """What the first layer reads: [T, hidden]."""
        hidden = self.embedding.rows(batch.ids).to(self.dtype)
        if self.how.embedding_scale != 1:
            # In the dtype of the model, as transformers has it.
            hidden = hidden * hidden.new_tensor(self.how.embedding_scale)
        if self.positions is not None and self.how.positions is not None:
            hidden = hidden + self.positions[batch.positions + self.how.positions.offset]
        return hidden

    def angles(self, batch: FlatBatch) -> tuple[Angles, ...]:
        """Of each rotation, in the dtype that it happens in."""
        lengths = batch.lengths[batch.sequence.long()]
        dtype = torch.float32 if self.how.rotate_late else self.dtype
        found = (rotation.angles(batch.positions, lengths) for rotation in self.rotations)
        return tuple((cos.to(dtype), sin.to(dtype)) for cos, sin in found)
