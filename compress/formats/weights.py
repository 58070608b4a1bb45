"""Dense weights of any checkpoint we can read, by the names of the original model.

A dense checkpoint is passed through; a compressed-tensors one is decoded one tensor at a time, so
no more than one dense weight is in memory because of us.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from compress.arch.describe import describe
from compress.arch.spec import DecoderSpec
from compress.checkpoint.reader import Checkpoint
from compress.errors import CheckpointError
from compress.formats import compressed_tensors
from compress.formats.detect import detect
from compress.formats.scheme_map import SchemeMap, parse
from compress.quant.tensor import InputQuantization, QuantizedTensor


class Weights(Protocol):
    """What blocks and evaluation need of a checkpoint, dense or compressed."""

    @property
    def checkpoint(self) -> Checkpoint: ...

    @property
    def spec(self) -> DecoderSpec: ...

    def read(self, tensor: str) -> Tensor:
        """Weight by its original name, in its original order, in the dtype it is stored with."""

    def activation(self, linear: str) -> InputQuantization | None:
        """How the inputs of a linear (by module name) are quantized at run time, if at all."""


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """A checkpoint that holds every weight as it is."""

    checkpoint: Checkpoint
    spec: DecoderSpec

    def read(self, tensor: str) -> Tensor:
        return self.checkpoint.read(tensor)

    def activation(self, linear: str) -> InputQuantization | None:
        return None


@dataclass(frozen=True, slots=True)
class CompressedWeights:
    """A compressed-tensors checkpoint; `schemes` says what each module is stored as."""

    checkpoint: Checkpoint
    spec: DecoderSpec
    schemes: SchemeMap

    def read(self, tensor: str) -> Tensor:
        """Dense weight in the scales' dtype for a quantized one, the stored tensor otherwise."""
        quantized = self.quantized(tensor)
        if quantized is None:
            return self.checkpoint.read(tensor)
        weight = quantized.dequantize(quantized.scale.dtype)
        module = compressed_tensors.module_of(tensor)
        return weight.t().contiguous() if module in self.schemes.transposed else weight

    def quantized(self, tensor: str) -> QuantizedTensor | None:
        """Codes and scales [N, K] of a weight, None when it is stored dense."""
        if not _is_quantized(tensor, self.checkpoint.tensors):
            return None
        module = compressed_tensors.module_of(tensor)
        scheme = self.schemes.scheme(module)
        if scheme is None:
            raise CheckpointError(
                f"{module} has quantized tensors but no config group of quantization_config matches"
                " it; the config and the tensors do not belong together"
            )
        tensors, read = self.checkpoint.tensors, self.checkpoint.read
        return compressed_tensors.decode(tensor, scheme, tensors.__contains__, read)

    def activation(self, linear: str) -> InputQuantization | None:
        scheme = self.schemes.scheme(linear)
        if scheme is None or not _is_quantized(f"{linear}.weight", self.checkpoint.tensors):
            return None
        return None if scheme.activation is None else InputQuantization(scheme.activation)


def open_weights(
    checkpoint: Checkpoint, spec: DecoderSpec | None = None
) -> DenseWeights | CompressedWeights:
    """Weights of a dense or compressed-tensors checkpoint; `spec` is derived when not given.

    CheckpointError for any other quantization format, which is named, and for a malformed one.
    """
    method = detect(checkpoint.config, checkpoint.tensors)
    if method not in (None, compressed_tensors.NAME):
        raise CheckpointError(
            f"{checkpoint.path} is quantized in the format {method!r}; dense and"
            f" {compressed_tensors.NAME} checkpoints can be read, so take the original"
        )
    if spec is None:
        spec = describe(checkpoint.config, logical_shapes(checkpoint))
    if method is None:
        return DenseWeights(checkpoint, spec)
    return CompressedWeights(checkpoint, spec, parse(checkpoint.config))


def logical_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the original model's tensors, in file order.

    Those of a dense checkpoint are returned as they are; a compressed weight's parts become one
    `x.weight` of its original shape.
    """
    tensors = checkpoint.tensors
    if detect(checkpoint.config, tensors) != compressed_tensors.NAME:
        return {name: info.shape for name, info in tensors.items()}
    transposed = parse(checkpoint.config).transposed
    shapes: dict[str, tuple[int, ...]] = {}
    for name, info in tensors.items():
        module, _, part = name.rpartition(".")
        if not _is_quantized(f"{module}.weight", tensors):
            shapes[name] = info.shape
        elif part in ("weight", "weight_shape"):
            shape = info.shape
            if part == "weight_shape":
                shape = compressed_tensors.shape_from(checkpoint.read(name), module)
            shapes[f"{module}.weight"] = shape[::-1] if module in transposed else shape
        elif part not in compressed_tensors.PARTS:  # its bias
            shapes[name] = info.shape
    return shapes


def _is_quantized(tensor: str, tensors: Mapping[str, object]) -> bool:
    return tensor.endswith(".weight") and f"{tensor}_scale" in tensors
