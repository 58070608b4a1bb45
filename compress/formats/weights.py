"""Dense weights of any checkpoint we can read, by the names of the original model.

A dense checkpoint is passed through; a compressed-tensors one is decoded one tensor at a time, so
no more than one dense weight is in memory because of us.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from compress.arch.describe import describe
from compress.arch.spec import BlockSpec, DecoderSpec
from compress.checkpoint.dtypes import TORCH_DTYPES
from compress.checkpoint.reader import Checkpoint
from compress.errors import CheckpointError
from compress.formats import (
    bitsandbytes,
    bitsandbytes_weights,
    compressed_tensors,
    ct_decode,
    kv_cache,
)
from compress.formats.bitsandbytes_weights import BitsandbytesWeights
from compress.formats.detect import detect
from compress.formats.names import module_of
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

    def cache(self, block: BlockSpec) -> tuple[InputQuantization, InputQuantization] | None:
        """How a block's keys and values are stored in the cache, None for as they are."""


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """A checkpoint that holds every weight as it is."""

    checkpoint: Checkpoint
    spec: DecoderSpec

    def read(self, tensor: str) -> Tensor:
        return self.checkpoint.read(tensor)

    def activation(self, linear: str) -> InputQuantization | None:
        return None

    def cache(self, block: BlockSpec) -> None:
        return None


@dataclass(frozen=True, slots=True)
class CompressedWeights:
    """A compressed-tensors checkpoint; `schemes` says what each module is stored as."""

    checkpoint: Checkpoint
    spec: DecoderSpec
    schemes: SchemeMap

    def read(self, tensor: str) -> Tensor:
        """Dense weight in the scales' dtype for a quantized one, the stored tensor otherwise.

        NVFP4's scales are E4M3: its weights come in the dtype of the unquantized tensors.
        """
        quantized = self.quantized(tensor)
        if quantized is None:
            return self.checkpoint.read(tensor)
        weight = quantized.dequantize(
            self._plain_dtype() if quantized.scheme.is_fp4 else quantized.scale.dtype
        )
        module = module_of(tensor)
        return weight.t().contiguous() if module in self.schemes.transposed else weight

    def quantized(self, tensor: str) -> QuantizedTensor | None:
        """Codes and scales [N, K] of a weight, None when it is stored dense."""
        if not _is_quantized(tensor, self.checkpoint.tensors):
            return None
        module = module_of(tensor)
        scheme = self.schemes.scheme(module)
        if scheme is None:
            raise CheckpointError(
                f"{module} has quantized tensors but no config group of quantization_config matches"
                " it; the config and the tensors do not belong together"
            )
        tensors, read = self.checkpoint.tensors, self.checkpoint.read
        return ct_decode.decode(tensor, scheme, tensors.__contains__, read)

    def activation(self, linear: str) -> InputQuantization | None:
        """Scheme of the inputs of a quantized linear, with its scale [1] where that is static."""
        tensors = self.checkpoint.tensors
        scheme = self.schemes.scheme(linear)
        if scheme is None or not _is_quantized(f"{linear}.weight", tensors):
            return None
        if scheme.activation is None or scheme.activation.dynamic:
            return None if scheme.activation is None else InputQuantization(scheme.activation)
        scale = ct_decode.input_scale(linear, tensors.__contains__, self.checkpoint.read)
        return InputQuantization(scheme.activation, scale)

    def cache(self, block: BlockSpec) -> tuple[InputQuantization, InputQuantization] | None:
        """Scheme and scale [1] of a block's keys and of its values."""
        tensors, read = self.checkpoint.tensors, self.checkpoint.read
        names, scheme = kv_cache.scales_in(block, tensors), self.schemes.kv_cache
        if scheme is None or names is None:
            return None
        k, v = (ct_decode.one_number(x, "caches", tensors.__contains__, read) for x in names)
        return InputQuantization(scheme, k), InputQuantization(scheme, v)

    def _plain_dtype(self) -> torch.dtype:
        for name in (self.spec.embedding, self.spec.final_norm):
            info = self.checkpoint.tensors.get(name) if name is not None else None
            if info is not None and info.dtype in ("BF16", "F16", "F32"):
                return TORCH_DTYPES[info.dtype]
        return torch.bfloat16


def open_weights(
    checkpoint: Checkpoint, spec: DecoderSpec | None = None
) -> DenseWeights | CompressedWeights | BitsandbytesWeights:
    """Weights of a checkpoint in a format that can be read; `spec` is derived when not given.

    CheckpointError for any other quantization format, which is named, and for a malformed one.
    """
    method = detect(checkpoint.config, checkpoint.tensors)
    if method not in (None, compressed_tensors.NAME, bitsandbytes.NAME):
        raise CheckpointError(
            f"{checkpoint.path} is quantized in the format {method!r}; dense,"
            f" {compressed_tensors.NAME} and 8-bit {bitsandbytes.NAME} checkpoints can be read, so"
            " take the original"
        )
    if spec is None:
        spec = describe(checkpoint.config, logical_shapes(checkpoint))
    if method is None:
        return DenseWeights(checkpoint, spec)
    if method == bitsandbytes.NAME:
        dynamic = bitsandbytes_weights.read_scheme(checkpoint.config)
        side = bitsandbytes_weights.open_side(checkpoint)
        return BitsandbytesWeights(checkpoint, spec, dynamic, side)
    return CompressedWeights(checkpoint, spec, parse(checkpoint.config))


def logical_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the original model's tensors, in file order.

    Those of a dense checkpoint are returned as they are; a compressed weight's parts become one
    `x.weight` of its original shape.
    """
    tensors = checkpoint.tensors
    method = detect(checkpoint.config, tensors)
    if method == bitsandbytes.NAME:
        return bitsandbytes_weights.logical_shapes(checkpoint)
    if method != compressed_tensors.NAME:
        return {name: info.shape for name, info in tensors.items()}
    transposed = parse(checkpoint.config).transposed
    shapes: dict[str, tuple[int, ...]] = {}
    for name, info in tensors.items():
        module, _, part = name.rpartition(".")
        if kv_cache.is_cache_tensor(name):
            continue
        quantized = _is_quantized(f"{module}.weight", tensors)
        if not quantized or part not in ("weight", *compressed_tensors.PARTS):  # or its bias
            shapes[name] = info.shape
        elif (shape := _weight_shape(checkpoint, module, part)) is not None:
            shapes[f"{module}.weight"] = shape[::-1] if module in transposed else shape
    return shapes


def _weight_shape(checkpoint: Checkpoint, module: str, part: str) -> tuple[int, ...] | None:
    """(N, K) of a quantized weight, from the one of its parts that tells."""
    shape = checkpoint.tensors[f"{module}.{part}"].shape
    if part == "weight":
        return shape
    if part == "weight_shape":
        return ct_decode.shape_from(checkpoint.read(f"{module}.{part}"), module)
    nvfp4 = part == "weight_packed" and f"{module}.weight_shape" not in checkpoint.tensors
    return (shape[0], 2 * shape[1]) if nvfp4 and len(shape) == 2 else None


def _is_quantized(tensor: str, tensors: Mapping[str, object]) -> bool:
    return tensor.endswith(".weight") and f"{tensor}_scale" in tensors
