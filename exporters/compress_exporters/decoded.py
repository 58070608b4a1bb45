"""Quantized weights as the numbers that their codes mean."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from compress.formats.checked_reads import read_finite
from compress.formats.weights import CodedWeights, DenseWeights
from compress.quant.tensor import InputQuantization
from compress_exporters.exporter import Source


def decoded(source: Source, tensor: str) -> Tensor:
    """A weight by its original name, in its original order; a quantized one in fp32, not rounded
    any further. CheckpointError for NaN and infinity."""
    quantized = source.quantized(tensor)
    if quantized is None:
        return read_finite(source, tensor)
    assert isinstance(source, CodedWeights)
    weight = quantized.dequantize(torch.float32)
    return weight.t() if source.transposed(tensor.removesuffix(".weight")) else weight


@dataclass(frozen=True, slots=True)
class Decoded(DenseWeights):
    """A source whose quantized weights count as dense ones.

    inputs: of linears are rounded as the source says; else they stay as they are.
    """

    source: Source = field(kw_only=True)
    inputs: bool = field(kw_only=True)

    @classmethod
    def of(cls, source: Source, *, inputs: bool = False) -> "Decoded":
        return cls(source.checkpoint, source.spec, source=source, inputs=inputs)

    def read(self, tensor: str) -> Tensor:
        return decoded(self.source, tensor)

    def activation(self, linear: str) -> InputQuantization | None:  # type: ignore[override]
        return self.source.activation(linear) if self.inputs else None
