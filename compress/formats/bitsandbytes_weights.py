"""bitsandbytes' 8-bit checkpoints as open weights: ours, with fixed outlier columns, and others'.

config.json and the side file come with the checkpoint: every value is checked before use.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor

from compress.arch.families import FAMILIES
from compress.arch.sizes import text_config
from compress.arch.spec import BlockSpec, DecoderSpec
from compress.checkpoint.header import read_header
from compress.checkpoint.reader import Checkpoint
from compress.errors import CheckpointError
from compress.formats import bitsandbytes
from compress.formats.detect import find_block
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from compress.quant.tensor import InputQuantization, OutlierColumns, QuantizedTensor

DEFAULT_THRESHOLD = 6.0


@dataclass(frozen=True, slots=True)
class BitsandbytesWeights:
    """A checkpoint of 8-bit weights.

    dynamic: scheme of the linears whose columns are found at run time. side: the checkpoint as far
    as the side file goes, None where there is none.
    """

    checkpoint: Checkpoint
    spec: DecoderSpec
    dynamic: QuantScheme
    side: Checkpoint | None

    def read(self, tensor: str) -> Tensor:
        """Dense weight in fp32 (the scales' dtype) for a quantized one, the stored tensor
        otherwise; in its original order."""
        quantized = self.quantized(tensor)
        if quantized is None:
            return self.checkpoint.read(tensor)
        weight = quantized.dequantize()
        return weight.t().contiguous() if tensor in self._transposed() else weight

    def quantized(self, tensor: str) -> QuantizedTensor | None:
        """Codes, scales and outlier columns [N, K] of a weight, None when it is stored dense."""
        if not is_quantized(tensor, self.checkpoint.tensors):
            return None
        outliers = self.outliers(tensor)
        tensors, read = self.checkpoint.tensors, self.checkpoint.read
        scheme = self.dynamic if outliers is None else _calibrated(self.dynamic)
        return bitsandbytes.decode(tensor, scheme, tensors.__contains__, read, outliers)

    def cache(self, block: BlockSpec) -> None:
        """The format says nothing of the cache."""

    def outliers(self, tensor: str) -> OutlierColumns | None:
        """Columns that calibration fixed for a quantized weight, None where it did not."""
        if self.side is None:
            return None
        shape = self.checkpoint.tensors[tensor].shape
        side = self.side
        return bitsandbytes.decode_outliers(tensor, shape, side.tensors.__contains__, side.read)

    def scheme(self, linear: str) -> QuantScheme | None:
        """Scheme of a linear (by module name), None when it is stored dense."""
        tensor = f"{linear}.weight"
        if not is_quantized(tensor, self.checkpoint.tensors):
            return None
        fixed = self.side is not None and f"{linear}.columns" in self.side.tensors
        return _calibrated(self.dynamic) if fixed else self.dynamic

    def activation(self, linear: str) -> InputQuantization | None:
        scheme = self.scheme(linear)
        if scheme is None or scheme.activation is None:
            return None
        outliers = self.outliers(f"{linear}.weight")
        columns = None if outliers is None else outliers.columns
        return InputQuantization(scheme.activation, None, columns)

    def outlier_columns(self, linear: str) -> int | None:
        """How many input columns of a linear are fixed as outliers; None where none are."""
        weight = None if self.side is None else self.side.tensors.get(f"{linear}.columns")
        return None if weight is None else weight.shape[0]

    def _transposed(self) -> frozenset[str]:
        return frozenset(x.tensor for x in self.spec.all_linears() if x.transposed)


def open_side(checkpoint: Checkpoint) -> Checkpoint | None:
    """The side file as a checkpoint of its own, None where there is none."""
    path = checkpoint.path / bitsandbytes.SIDE_FILE
    if not path.exists():
        return None
    tensors = read_header(path, bitsandbytes.SIDE_FILE)
    return replace(checkpoint, tensors=MappingProxyType(tensors), files=(bitsandbytes.SIDE_FILE,))


def read_scheme(config: Mapping[str, Any]) -> QuantScheme:
    """Scheme of the quantized linears of a bitsandbytes checkpoint.

    A threshold of 0 means that no column is an outlier. CheckpointError, naming the key, for 4-bit
    checkpoints and for what is malformed.
    """
    place, block = find_block(config) or ("quantization_config", {})
    if block.get("load_in_4bit") or not block.get("load_in_8bit", True):
        raise CheckpointError(
            f"config.json: {place} is of bitsandbytes' 4-bit form; its 8-bit form can be read, so"
            " take the original"
        )
    threshold = block.get("llm_int8_threshold", DEFAULT_THRESHOLD)
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if not number or not 0 <= threshold < math.inf:
        raise CheckpointError(
            f"config.json: {place}.llm_int8_threshold is {threshold!r}; it must be a number of 0 or"
            " more, such as 6.0"
        )
    inputs = ActivationScheme(outliers="dynamic", threshold=float(threshold) or DEFAULT_THRESHOLD)
    if threshold == 0:
        inputs = ActivationScheme()
    return replace(PRESETS["LLM_INT8"], activation=inputs)


def _calibrated(scheme: QuantScheme) -> QuantScheme:
    assert scheme.activation is not None
    return replace(scheme, activation=replace(scheme.activation, outliers="calibrated"))


def logical_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the original model's tensors, in file order."""
    tensors, turned = checkpoint.tensors, _turned(checkpoint.config)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, info in tensors.items():
        module, _, part = name.rpartition(".")
        if not is_quantized(f"{module}.weight", tensors):
            shapes[name] = info.shape
        elif part == "weight":
            shapes[name] = info.shape[::-1] if turned(module) else info.shape
        elif part not in bitsandbytes.PARTS:  # its bias
            shapes[name] = info.shape
    return shapes


def _turned(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether the original stores a module's weight as [K, N]: as our config says, or else by the
    family's table, which other tools' checkpoints of a Conv1D need."""
    place, block = find_block(config) or ("quantization_config", {})
    named = block.get("transposed", [])
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise CheckpointError(f"config.json: {place}.transposed must be a list of module names")
    family = FAMILIES.get(str(text_config(config)[1].get("model_type")))
    rows = () if family is None else (*family.attention, *family.dense, *family.sparse)
    endings = tuple(f".{row.disk}" for row in rows if row.transposed)
    return lambda module: module in named or module.endswith(endings)


def is_quantized(tensor: str, tensors: Mapping[str, object]) -> bool:
    """Whether a weight is stored as codes."""
    return (
        tensor.endswith(".weight")
        and tensor in tensors
        and f"{tensor.removesuffix('.weight')}.SCB" in tensors
    )
