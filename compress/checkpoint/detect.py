"""Which quantization format a checkpoint is in, by its config and by its tensors' names."""

from collections.abc import Iterable, Mapping
from typing import Any

from compress.arch.text_config import text_config, with_config_at

# Under these a config.json says how the model is quantized, at the top or in the decoder's own.
KEYS = ("quantization_config", "compression_config")

# Tensor name endings that betray a format when the config says nothing, most telling first.
_ENDINGS = (
    ("token_embd.weight", "gguf"),
    (".weight_packed", "compressed-tensors"),
    (".weight_global_scale", "compressed-tensors"),
    (".SCB", "bitsandbytes"),
    (".quant_state.bitsandbytes__nf4", "bitsandbytes"),
    (".quant_state.bitsandbytes__fp4", "bitsandbytes"),
    (".weight_scale_inv", "fp8"),
    (".weight_scale_2", "modelopt"),
    (".qweight", "gptq or awq"),
    ("_blocks", "mxfp4"),
    (".weight_scale", "an unnamed format with weight_scale tensors"),
)
# What quant_method "gptq" is in other words of its config: gptqmodel calls AWQ's layout so too.
_GPTQ_KINDS = {"gptq_v2": "gptq_v2", "gemm": "awq"}
# A tensor that must be there as well, for an ending that means something only in company.
_COMPANION = {"_blocks": "_scales"}


def detect(config: Mapping[str, Any], tensors: Iterable[str]) -> str | None:
    """Name of the format, in the spelling of `quant_method`; None for a checkpoint that is dense.

    "compressed-tensors", "gptq", "gptq_v2" (whose quant_method is "gptq" too), "awq",
    "bitsandbytes", "fp8", "modelopt", "mxfp4", "gguf" (which is known by its tensors alone, its
    own names) and so on. The config wins; without one, the names
    of the tensors decide.
    """
    found = find_block(config)
    return _by_names(frozenset(tensors)) if found is None else _method(found[1])


def find_block(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Place and content of the quantization config in config.json, None where there is none."""
    path, text = text_config(config)
    for prefix, place in (((), config), (path, text)):
        for key in KEYS:
            block = place.get(key)
            if isinstance(block, Mapping) and block:
                return ".".join((*prefix, key)), block
    return None


def without_block(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the dense original: nothing says how it is quantized."""
    path, text = text_config(config)
    return _plain(with_config_at(config, path, _plain(text)))


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in KEYS}


def _method(block: Mapping[str, Any]) -> str:
    method = block.get("quant_method")
    if method:
        stored = block.get("checkpoint_format") or block.get("format")
        name = str(method).lower()
        return _GPTQ_KINDS.get(str(stored), name) if name == "gptq" else name
    if block.get("load_in_8bit") or block.get("load_in_4bit"):
        return "bitsandbytes"
    if "quant_algo" in block or "quantization" in block:
        return "modelopt"
    return "compressed-tensors" if "config_groups" in block else "an unnamed format"


def _by_names(names: frozenset[str]) -> str | None:
    for ending, method in _ENDINGS:
        companion = _COMPANION.get(ending)
        for name in names:
            if name.endswith(ending) and (
                companion is None or name.removesuffix(ending) + companion in names
            ):
                return method
    return None
