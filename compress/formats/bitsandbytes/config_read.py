"""What bitsandbytes' config.json and our side file say of a checkpoint, read with suspicion.

Both come with the checkpoint: every value is checked before use.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from compress.checkpoint.detect import find_block
from compress.checkpoint.reader import Checkpoint
from compress.checkpoint.shards.header import read_header
from compress.errors import CheckpointError
from compress.formats.bitsandbytes import codec as bitsandbytes
from compress.formats.conv1d import names_in
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme

DEFAULT_THRESHOLD = 6.0


@dataclass(frozen=True, slots=True)
class Int8Schemes:
    """dynamic: scheme of every linear that is quantized, its columns found at run time. skipped:
    modules that the config leaves alone."""

    dynamic: QuantScheme
    skipped: frozenset[str]

    def scheme(self, module: str) -> QuantScheme | None:
        return None if module in self.skipped else self.dynamic


def read_schemes(config: Mapping[str, Any]) -> Int8Schemes:
    """Schemes of a bitsandbytes checkpoint. A threshold of 0 means that no column is an outlier.

    CheckpointError, naming the key, for 4-bit checkpoints and for what is malformed.
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
    skipped = names_in(config, "llm_int8_skip_modules")
    return Int8Schemes(replace(PRESETS["LLM_INT8"], activation=inputs), skipped)


def calibrated(scheme: QuantScheme) -> QuantScheme:
    """The scheme of a linear whose outlier columns are fixed in the side file."""
    assert scheme.activation is not None
    return replace(scheme, activation=replace(scheme.activation, outliers="calibrated"))


def open_side(checkpoint: Checkpoint) -> Checkpoint | None:
    """The side file as a checkpoint of its own, None where there is none."""
    path = checkpoint.path / bitsandbytes.SIDE_FILE
    if not path.exists():
        return None
    tensors = read_header(path, bitsandbytes.SIDE_FILE)
    return replace(checkpoint, tensors=MappingProxyType(tensors), files=(bitsandbytes.SIDE_FILE,))


def weight_shape(
    module: str, scheme: QuantScheme, shape_of: Callable[[str], tuple[int, ...] | None]
) -> tuple[int, int]:
    """(N, K) of a quantized weight; CheckpointError when its codes are missing or no matrix."""
    shape = shape_of(f"{module}.weight")
    if shape is None or len(shape) != 2:
        raise CheckpointError(
            f"{module}.weight is {'missing' if shape is None else list(shape)} beside an SCB; it"
            " must be int8 codes [N, K]"
        )
    return shape[0], shape[1]
