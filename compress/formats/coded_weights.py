"""Weights of a quantized checkpoint: decoded one tensor at a time, so that no more than one dense
weight is in memory because of us."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from compress.arch.spec import BlockSpec, DecoderSpec
from compress.checkpoint.reader import Checkpoint
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.errors import CheckpointError
from compress.formats import kv_cache
from compress.formats.bitsandbytes import codec as bitsandbytes
from compress.formats.bitsandbytes import config_read as bitsandbytes_config
from compress.formats.checked_reads import refuse_nonfinite
from compress.formats.compressed_tensors import decode as ct_decode
from compress.formats.compressed_tensors.config_read import SchemeMap
from compress.formats.format import Format, Reader, Schemes
from compress.formats.misfits import is_quantized, no_scheme, without_values
from compress.formats.names import module_of
from compress.formats.stored import Beside, Stored, one_number
from compress.quant.blocks import BlockTensor
from compress.quant.scheme import ActivationScheme, QuantScheme
from compress.quant.tensor import InputQuantization, OutlierColumns, QuantizedTensor


@dataclass(frozen=True, slots=True)
class CodedWeights:
    """A quantized checkpoint in any format of FORMATS.

    schemes: what config.json says of the modules. turned: whether the original stores a module's
    weight as [K, N]. side: bitsandbytes' calibrated outlier columns, as a checkpoint of their own;
    None where there are none.
    """

    checkpoint: Checkpoint
    spec: DecoderSpec
    format: Format
    reader: Reader
    schemes: Schemes
    turned: Callable[[str], bool]
    side: Checkpoint | None = None

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        return (self.checkpoint,) if self.side is None else (self.checkpoint, self.side)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return logical_shapes(self.checkpoint, self.reader, self.schemes, self.turned)

    @property
    def plain_dtype(self) -> torch.dtype:
        for name in (self.spec.embedding, self.spec.final_norm):
            info = self.checkpoint.tensors.get(name) if name is not None else None
            if info is not None and info.dtype in ("BF16", "F16", "F32"):
                return TORCH_DTYPES[info.dtype]
        return torch.bfloat16

    @property
    def kv_cache(self) -> ActivationScheme | None:
        return self.schemes.kv_cache if isinstance(self.schemes, SchemeMap) else None

    def with_checkpoint(self, checkpoint: Checkpoint) -> Self:
        return replace(self, checkpoint=checkpoint)

    def read(self, tensor: str, *, check_finite: bool = False) -> Tensor:
        """Not in the dtype of the scales: formats store equal scales in different ones, and the
        same codes and scales are to be the same weights in all of them."""
        quantized = self.quantized(tensor)
        if quantized is None:
            return self.checkpoint.read(tensor, check_finite=check_finite)
        weight = quantized.dequantize(self.plain_dtype)
        weight = weight.t().contiguous() if self.turned(module_of(tensor)) else weight
        if check_finite:
            refuse_nonfinite(tensor, weight)
        return weight

    def read_rows(
        self, tensor: str, start: int, stop: int, *, check_finite: bool = False
    ) -> Tensor:
        if self._holds_codes(tensor):
            return self.read(tensor, check_finite=check_finite)[start:stop]
        return self.checkpoint.read_rows(tensor, start, stop, check_finite=check_finite)

    def quantized(self, tensor: str) -> QuantizedTensor | None:
        return self._quantized(tensor, self.checkpoint.read, values=True)

    def blocks(self, tensor: str, *, check_finite: bool = False) -> BlockTensor | None:
        return None

    def outlined(self, tensor: str) -> QuantizedTensor | None:
        reader, checkpoint = self.reader, self.checkpoint
        codes = set(reader.large) - set(reader.scales)

        def read(name: str) -> Tensor:
            unread = name.rpartition(".")[2] in codes
            return without_values(checkpoint, name) if unread else checkpoint.read(name)

        return self._quantized(tensor, read, values=False)

    def _quantized(
        self, tensor: str, read: Callable[[str], Tensor], *, values: bool
    ) -> QuantizedTensor | None:
        if not self._holds_codes(tensor):
            return None
        module = module_of(tensor)
        scheme = self.scheme(module)
        if scheme is None:
            raise CheckpointError(no_scheme(module))
        has = self.checkpoint.tensors.__contains__
        quantized = self.reader.decode(tensor, scheme, has, read)
        outliers = self._outliers(tensor, values=values)
        return quantized if outliers is None else replace(quantized, outliers=outliers)

    def beside(self, linear: str) -> Beside:
        if not self.is_quantized(linear):
            return Beside()
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

    def stored_in(self, tensor: str) -> str | None:
        info = self.checkpoint.tensors.get(tensor)
        return None if info is None else info.dtype

    def is_quantized(self, linear: str) -> bool:
        return is_quantized(linear, self.checkpoint.tensors, self.reader)

    def _holds_codes(self, tensor: str) -> bool:
        return tensor.endswith(".weight") and self.is_quantized(module_of(tensor))

    def transposed(self, linear: str) -> bool:
        return self.turned(linear)

    def scheme(self, linear: str) -> QuantScheme | None:
        if not self.is_quantized(linear):
            return None
        scheme = self.schemes.scheme(linear)
        fixed = self.side is not None and f"{linear}.columns" in self.side.tensors
        return bitsandbytes_config.calibrated(scheme) if scheme is not None and fixed else scheme

    def activation(self, linear: str) -> InputQuantization | None:
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
        weight = None if self.side is None else self.side.tensors.get(f"{linear}.columns")
        return None if weight is None else weight.shape[0]

    def cache(self, block: BlockSpec) -> tuple[InputQuantization, InputQuantization] | None:
        tensors, read, scheme = self.checkpoint.tensors, self.checkpoint.read, self.kv_cache
        if scheme is None:
            return None
        names = kv_cache.scales_in(block, tensors)
        if names is None:
            kv_cache.refuse_lost(block, tensors)
            return None
        k, v = (one_number(name, read(name)) for name in names)
        return InputQuantization(scheme, k), InputQuantization(scheme, v)


def logical_shapes(
    checkpoint: Checkpoint, reader: Reader, schemes: Schemes, turned: Callable[[str], bool]
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the original's tensors, in file order: as `Weights.shapes`."""
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
            shapes[weight] = shape[::-1] if turned(module) else shape
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
