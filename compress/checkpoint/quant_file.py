"""Files beside config.json that say how a model is quantized.

ModelOpt's older exports, and those for TensorRT-LLM, have hf_quant_config.json and no
quantization_config in config.json, and none has the group size of W4A16_AWQ there. Old GPTQ and AWQ
checkpoints have quantize_config.json (AutoGPTQ) or quant_config.json (AutoAWQ, llm-awq) alone, most
of them without a quant_method. With both together readers need to look at one place only.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from compress.arch.text_config import text_config
from compress.checkpoint.detect import KEYS
from compress.checkpoint.jsonfile import read_object

HF_QUANT_CONFIG = "hf_quant_config.json"
# File -> the quant_method of those that name none.
PACKED_FILES: Mapping[str, str] = MappingProxyType(
    {"quantize_config.json": "gptq", "quant_config.json": "awq"}
)


def with_quant_file(
    folder: Path, config: dict[str, Any], tensors: Iterable[str] = ()
) -> dict[str, Any]:
    """config.json's content, completed from such a file where there is one.

    tensors: names of all; GPTQ's and AWQ's files count only where some weight is packed, as they
    are left lying beside dequantized models too. CheckpointError when a file that counts is not a
    JSON object.
    """
    path = folder / HF_QUANT_CONFIG
    if path.is_file():
        return completed(config, read_object(path))
    if _is_named(config) or not any(name.endswith(".qweight") for name in tensors):
        return config
    for name, method in PACKED_FILES.items():
        if (folder / name).is_file():
            return {**config, KEYS[0]: {"quant_method": method, **read_object(folder / name)}}
    return config


def completed(config: dict[str, Any], side: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `side`, hf_quant_config.json's content, as its quantization_config where it has
    none, and with the group size where ModelOpt's own quantization_config lacks it."""
    if not _is_named(config):
        return {**config, KEYS[0]: {"quant_method": "modelopt", **side}}
    block, inner = config.get(KEYS[0]), side.get("quantization")
    if not isinstance(block, Mapping) or block.get("quant_method") != "modelopt":
        return config
    size = inner.get("group_size") if isinstance(inner, Mapping) else None
    if size is None or "group_size" in block or "quantization" in block:
        return config
    return {**config, KEYS[0]: {**block, "group_size": size}}


def _is_named(config: Mapping[str, Any]) -> bool:
    """Whether config.json itself says how the model is quantized."""
    places = (config, text_config(config)[1])
    return any(place.get(key) for place in places for key in KEYS)
