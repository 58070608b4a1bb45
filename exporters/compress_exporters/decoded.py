"""Quantized weights as the numbers that their codes mean."""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.formats.checked_reads import refuse_nonfinite
from compress.formats.weights import DenseWeights, Weights
from compress.quant.tensor import InputQuantization


def decoded(source: Weights, tensor: str) -> Tensor:
    """A weight by its original name, in its original order; a quantized one in fp32, not rounded
    any further. CheckpointError for NaN and infinity."""
    quantized = source.quantized(tensor)
    if quantized is None:
        return source.read(tensor, check_finite=True)
    weight = quantized.dequantize(torch.float32)
    return weight.t() if source.transposed(tensor.removesuffix(".weight")) else weight


@dataclass(frozen=True, slots=True)
class Decoded(DenseWeights):
    """A source whose quantized weights count as dense ones.

    inputs: of linears are rounded as the source says; else they stay as they are.
    """

    source: Weights = field(kw_only=True)
    inputs: bool = field(kw_only=True)

    @classmethod
    def of(cls, source: Weights, *, inputs: bool = False) -> "Decoded":
        return cls(source.checkpoint, source.spec, source=source, inputs=inputs)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.source.shapes

    @property
    def plain_dtype(self) -> torch.dtype:
        return self.source.plain_dtype

    def with_checkpoint(self, checkpoint: Checkpoint) -> Self:
        source = self.source.with_checkpoint(checkpoint)
        return replace(self, checkpoint=checkpoint, source=source)

    def read(self, tensor: str, *, check_finite: bool = False) -> Tensor:
        value = decoded(self.source, tensor)
        if check_finite:
            refuse_nonfinite(tensor, value)
        return value

    def read_rows(
        self, tensor: str, start: int, stop: int, *, check_finite: bool = False
    ) -> Tensor:
        return self.read(tensor, check_finite=check_finite)[start:stop]

    def transposed(self, linear: str) -> bool:
        return self.source.transposed(linear)

    def activation(self, linear: str) -> InputQuantization | None:
        return self.source.activation(linear) if self.inputs else None
