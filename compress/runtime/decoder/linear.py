"""Linear layers of the engine: a dense weight, or packed codes, decoded when they are used."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.arch.spec import LinearSpec
from compress.formats.weights import Weights
from compress.quant.activations import fake_quantize
from compress.quant.tensor import InputQuantization
from compress.runtime.decoder.packed import PackedWeight
from compress_kernels.ops.linear import linear


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """weight: [N, K]. bias: [N] or None. inputs: how inputs are rounded, None for not at all; each
    token by itself, as it must not matter what else a step has.

    dtype: of the products. Rows come in the multiples that compress_kernels.ops.linear.row_multiple
    names, for which their bits depend on nothing but themselves.
    """

    weight: Tensor | PackedWeight
    bias: Tensor | None
    inputs: InputQuantization | None
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, K] -> [rows, N]."""
        x = x if self.inputs is None else fake_quantize(x, self.inputs, alone=True)
        if isinstance(self.weight, Tensor):
            return linear(x, self.weight, self.bias)
        out = x.new_empty(len(x), self.weight.shape[0])
        for rows in self.weight.tiles():
            bias = None if self.bias is None else self.bias[rows]
            linear(x, self.weight.dequantize(rows, self.dtype), bias, out[:, rows])
        return out


def load_linear(
    weights: Weights, spec: LinearSpec, *, dtype: torch.dtype, device: torch.device
) -> Linear:
    """A linear of a checkpoint; codes stay packed. CheckpointError for NaN or infinity."""
    name = f"{spec.name}.bias"
    bias = None
    if name in weights.checkpoint.tensors:
        bias = weights.read(name, check_finite=True).to(device, dtype)
    quantized = weights.quantized(spec.tensor)
    inputs = weights.activation(spec.name)
    if quantized is not None:
        packed = PackedWeight.of(quantized, device, weights.plain_dtype)
        return Linear(packed, bias, inputs, dtype)
    weight = weights.read(spec.tensor, check_finite=True).to(device, dtype)
    weight = weight.t().contiguous() if spec.transposed else weight
    return Linear(weight, bias, inputs, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """Linears that read one input: one product where they are plain.

    linears: one for all parts, or one a part. sizes: outputs of each part.
    """

    linears: tuple[Linear, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, parts: tuple[Linear, ...], sizes: tuple[int, ...]) -> "Joint":
        """parts: one linear for each size, or one that is fused already."""
        joined = _join(parts) if len(parts) > 1 else None
        return cls(parts if joined is None else (joined,), sizes)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """x: [rows, K] -> [rows, size] for each part."""
        if len(self.linears) == len(self.sizes):
            return tuple(linear(x) for linear in self.linears)
        return torch.split(self.linears[0](x), list(self.sizes), dim=-1)


def _join(parts: tuple[Linear, ...]) -> Linear | None:
    """One linear in place of several; None where a part is not plain."""
    weights = [part.weight for part in parts if isinstance(part.weight, Tensor)]
    biases = [part.bias for part in parts if part.bias is not None]
    plain = all(part.inputs is None for part in parts) and len(biases) in (0, len(parts))
    if not plain or len(weights) < len(parts):
        return None
    return Linear(torch.cat(weights), torch.cat(biases) if biases else None, None, parts[0].dtype)
