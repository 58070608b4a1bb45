"""ModelOpt says beside config.json, in hf_quant_config.json, how a model is quantized.

Its older exports, and those for TensorRT-LLM, have no quantization_config in config.json, and none
has the group size of W4A16_AWQ there. With both together readers need to look at one place only.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.checkpoint.jsonfile import read_object

HF_QUANT_CONFIG = "hf_quant_config.json"
_KEYS = ("quantization_config", "compression_config")


def with_quant_file(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """config.json's content, completed from that file where there is one.

    CheckpointError when the file is not a JSON object.
    """
    path = folder / HF_QUANT_CONFIG
    return completed(config, read_object(path)) if path.is_file() else config


def completed(config: dict[str, Any], side: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `side`, the other file's content, as its quantization_config where it has none,
    and with the group size where ModelOpt's own quantization_config lacks it."""
    text = config.get("text_config")
    places = (config, text if isinstance(text, Mapping) else {})
    if not any(place.get(key) for place in places for key in _KEYS):
        return {**config, _KEYS[0]: {"quant_method": "modelopt", **side}}
    block, inner = config.get(_KEYS[0]), side.get("quantization")
    if not isinstance(block, Mapping) or block.get("quant_method") != "modelopt":
        return config
    size = inner.get("group_size") if isinstance(inner, Mapping) else None
    if size is None or "group_size" in block or "quantization" in block:
        return config
    return {**config, _KEYS[0]: {**block, "group_size": size}}
