"""Dense weights of any checkpoint we can read, by the names of the original model.

A dense checkpoint is passed through; a quantized one is decoded one tensor at a time, so no more
than one dense weight is in memory because of us.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from compress.arch.describe import describe
from compress.arch.spec import BlockSpec, DecoderSpec
from compress.checkpoint.detect import detect
from compress.checkpoint.reader import Checkpoint
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.errors import CheckpointError
from compress.formats import kv_cache
from compress.formats.bitsandbytes import codec as bitsandbytes
from compress.formats.bitsandbytes import config_read as bitsandbytes_config
from compress.formats.compressed_tensors import decode as ct_decode
from compress.formats.compressed_tensors.config_read import SchemeMap
from compress.formats.format import Format, Reader, Schemes
from compress.formats.misfits import is_quantized, no_scheme, refuse_misfits, without_values
from compress.formats.names import module_of
from compress.formats.stored import Beside, Stored, one_number
from compress.formats.table import by_method, readable
from compress.quant.activations import rounds_together
from compress.quant.scheme import ActivationScheme, QuantScheme
from compress.quant.tensor import InputQuantization, OutlierColumns, QuantizedTensor


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

    def quantized(self, tensor: str) -> None:
        return None

    def outlined(self, tensor: str) -> None:
        return None

    def activation(self, linear: str) -> None:
        return None

    def cache(self, block: BlockSpec) -> None:
        return None


@dataclass(frozen=True, slots=True)
class CodedWeights:
    """A quantized checkpoint in any format of FORMATS.

    schemes: what config.json says of the modules. transposed: whether the original stores a
    module's weight as [K, N]. side: bitsandbytes' calibrated outlier columns, as a checkpoint of
    their own; None where there are none.
    """

    checkpoint: Checkpoint
    spec: DecoderSpec
    format: Format
    reader: Reader
    schemes: Schemes
    transposed: Callable[[str], bool]
    side: Checkpoint | None = None

    def read(self, tensor: str) -> Tensor:
        """Dense weight for a quantized one, rounded once to `plain_dtype`; else the stored tensor.

        Not to the dtype of the scales: formats store equal scales in different ones, and the same
        codes and scales are to be the same weights in all of them.
        """
        quantized = self.quantized(tensor)
        if quantized is None:
            return self.checkpoint.read(tensor)
        weight = quantized.dequantize(self.plain_dtype)
        return weight.t().contiguous() if self.transposed(module_of(tensor)) else weight

    def quantized(self, tensor: str) -> QuantizedTensor | None:
        """Codes and scales [N, K] of a weight, None when it is stored dense."""
        return self._quantized(tensor, self.checkpoint.read, values=True)

    def outlined(self, tensor: str) -> QuantizedTensor | None:
        """As `quantized`, with codes and outliers' weights on the device meta: they are not
        read."""
        reader, checkpoint = self.reader, self.checkpoint
        codes = set(reader.large) - set(reader.scales)

        def read(name: str) -> Tensor:
            unread = name.rpartition(".")[2] in codes
            return without_values(checkpoint, name) if unread else checkpoint.read(name)

        return self._quantized(tensor, read, values=False)

    def _quantized(
        self, tensor: str, read: Callable[[str], Tensor], *, values: bool
    ) -> QuantizedTensor | None:
        module = tensor.removesuffix(".weight")
        if not tensor.endswith(".weight") or not self.is_quantized(module):
            return None
        scheme = self.scheme(module)
        if scheme is None:
            raise CheckpointError(no_scheme(module))
        has = self.checkpoint.tensors.__contains__
        quantized = self.reader.decode(tensor, scheme, has, read)
        outliers = self._outliers(tensor, values=values)
        return quantized if outliers is None else replace(quantized, outliers=outliers)

    def beside(self, linear: str) -> Beside:
        """What a quantized weight (by module name) has beside codes and scales, which are not read.

        CheckpointError for values that cannot be.
        """
        scheme = self.scheme(linear)
        if scheme is None:
            raise CheckpointError(no_scheme(linear))
        read, reader = self.checkpoint.read, self.reader

        def small(name: str) -> Tensor:
            part = name.removeprefix(f"{linear}.")
            return without_values(self.checkpoint, name) if part in reader.large else read(name)

        stored = Stored(linear, scheme, self.checkpoint.tensors.__contains__, small)
        rest = reader.beside(stored, reader.gather(stored))
        self._outliers(f"{linear}.weight", values=False)
        return rest

    def is_quantized(self, linear: str) -> bool:
        """Whether the weight of a linear (by module name) is stored as codes."""
        return is_quantized(linear, self.checkpoint.tensors, self.reader)

    def scheme(self, linear: str) -> QuantScheme | None:
        """Scheme of a linear (by module name); None when it is stored dense, and when the config
        says nothing of it."""
        if not self.is_quantized(linear):
            return None
        scheme = self.schemes.scheme(linear)
        fixed = self.side is not None and f"{linear}.columns" in self.side.tensors
        return bitsandbytes_config.calibrated(scheme) if scheme is not None and fixed else scheme

    def activation(self, linear: str) -> InputQuantization | None:
        """Scheme of the inputs of a quantized linear, with its scale [1] where that is static and
        its outlier columns where calibration fixed them."""
        scheme = self.scheme(linear)
        if scheme is None:
            return None
        tensors, read = self.checkpoint.tensors, self.checkpoint.read
        found = self.reader.inputs(linear, scheme, tensors.__contains__, read)
        outliers = self.outliers(f"{linear}.weight")
        if found is None or outliers is None:
            return found
        return replace(found, columns=outliers.columns)

    def outliers(self, tensor: str) -> OutlierColumns | None:
        """Columns that calibration fixed for a quantized weight, None where it did not."""
        return self._outliers(tensor, values=True)

    def _outliers(self, tensor: str, *, values: bool) -> OutlierColumns | None:
        """values: with the columns' weights, else checked only."""
        if self.side is None or tensor not in self.checkpoint.tensors:
            return None
        shape, side = self.checkpoint.tensors[tensor].shape, self.side

        def read(name: str) -> Tensor:
            return side.read(name) if values or name != tensor else without_values(side, name)

        return bitsandbytes.decode_outliers(tensor, shape, side.tensors.__contains__, read)

    def outlier_columns(self, linear: str) -> int | None:
        """How many input columns of a linear are fixed as outliers; None where none are."""
        weight = None if self.side is None else self.side.tensors.get(f"{linear}.columns")
        return None if weight is None else weight.shape[0]

    @property
    def kv_cache(self) -> ActivationScheme | None:
        """How keys and values are stored in the cache; None for as they are."""
        return self.schemes.kv_cache if isinstance(self.schemes, SchemeMap) else None

    def cache(self, block: BlockSpec) -> tuple[InputQuantization, InputQuantization] | None:
        """Scheme and scale [1] of a block's keys and of its values."""
        tensors, read, scheme = self.checkpoint.tensors, self.checkpoint.read, self.kv_cache
        if scheme is None:
            return None
        names = kv_cache.scales_in(block, tensors)
        if names is None:
            kv_cache.refuse_lost(block, tensors)
            return None
        k, v = (one_number(name, read(name)) for name in names)
        return InputQuantization(scheme, k), InputQuantization(scheme, v)

    @property
    def plain_dtype(self) -> torch.dtype:
        """Dtype of the tensors that are not quantized."""
        for name in (self.spec.embedding, self.spec.final_norm):
            info = self.checkpoint.tensors.get(name) if name is not None else None
            if info is not None and info.dtype in ("BF16", "F16", "F32"):
                return TORCH_DTYPES[info.dtype]
        return torch.bfloat16


def open_weights(
    checkpoint: Checkpoint, spec: DecoderSpec | None = None
) -> DenseWeights | CodedWeights:
    """Weights of a checkpoint in a format that can be read; `spec` is derived when not given.

    CheckpointError for any other quantization format, which is named, and for a malformed one.
    """
    method = detect(checkpoint.config, checkpoint.tensors)
    if method is None:
        return DenseWeights(checkpoint, spec or describe(checkpoint.config, checkpoint.shapes))
    found = by_method(method)
    if found is None:
        raise CheckpointError(
            f"{checkpoint.path} is quantized in the format {method!r}; {readable()} checkpoints can"
            " be read, so take the original"
        )
    fmt, reader = found
    schemes = reader.schemes(checkpoint.config)
    transposed = reader.transposed(checkpoint.config)
    refuse_misfits(checkpoint, reader, schemes)
    if spec is None:
        spec = describe(checkpoint.config, _logical(checkpoint, reader, schemes, transposed))
        _refuse_turned(spec, transposed, lambda x: is_quantized(x, checkpoint.tensors, reader))
    side = bitsandbytes_config.open_side(checkpoint) if method == bitsandbytes.NAME else None
    return CodedWeights(checkpoint, spec, fmt, reader, schemes, transposed, side)


def _refuse_turned(
    spec: DecoderSpec, transposed: Callable[[str], bool], is_coded: Callable[[str], bool]
) -> None:
    """Square weights fit either way, so that shapes do not tell. Without any list it is another
    tool's, whose codes lie as the original's weights."""
    place = "config.json: quantization_config.transposed"
    linears = spec.all_linears()
    named = [x for x in linears if transposed(x.name)]
    for linear in named:
        if not linear.transposed:
            raise CheckpointError(
                f"{place} has {linear.name}, which is no Conv1D in a {spec.model_type} model; take"
                " it out of the list"
            )
    coded = (x for x in linears if x.transposed and is_coded(x.name))
    if named and (lost := next((x.name for x in coded if not transposed(x.name)), None)):
        raise CheckpointError(
            f"{place} lacks {lost}, which is a Conv1D as those that it has; add it to the list"
        )


def logical_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the original model's tensors, in file order.

    Those of a dense checkpoint are returned as they are; a compressed weight's parts become one
    `x.weight` of its original shape.
    """
    found = by_method(detect(checkpoint.config, checkpoint.tensors) or "")
    if found is None:
        return checkpoint.shapes
    reader, config = found[1], checkpoint.config
    return _logical(checkpoint, reader, reader.schemes(config), reader.transposed(config))


def _logical(
    checkpoint: Checkpoint, reader: Reader, schemes: Schemes, transposed: Callable[[str], bool]
) -> dict[str, tuple[int, ...]]:
    tensors = checkpoint.tensors
    shapes: dict[str, tuple[int, ...]] = {}
    for name, info in tensors.items():
        module, _, part = name.rpartition(".")
        weight = f"{module}.weight"
        if kv_cache.is_cache_tensor(name) or (weight in shapes and part in reader.parts):
            continue
        if part not in (*reader.parts, "weight") or not is_quantized(module, tensors, reader):
            shapes[name] = info.shape  # a bias, or a module that is not quantized
        else:
            shape = _weight_shape(checkpoint, reader, schemes, module)
            shapes[weight] = shape[::-1] if transposed(module) else shape
    return shapes


def _weight_shape(
    checkpoint: Checkpoint, reader: Reader, schemes: Schemes, module: str
) -> tuple[int, ...]:
    """(N, K) of a quantized weight: as its own tensor says, or from the shapes of its parts."""
    said = f"{module}.weight_shape"
    if said in checkpoint.tensors:
        return ct_decode.shape_from(checkpoint.read(said), module)
    scheme = schemes.scheme(module)
    if scheme is not None:
        return reader.weight_shape(module, scheme, lambda name: _shape(checkpoint, name))
    if f"{module}.weight" not in checkpoint.tensors:
        raise CheckpointError(no_scheme(module))
    return checkpoint.tensors[f"{module}.weight"].shape


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...] | None:
    info = checkpoint.tensors.get(name)
    return None if info is None else info.shape


def rounds_calls(weights: Weights) -> bool:
    """Whether what a token is rounded to depends on the other tokens of a call, in some linear."""
    found = (weights.activation(linear.name) for linear in weights.spec.all_linears())
    return any(inputs is not None and rounds_together(inputs.scheme) for inputs in found)
