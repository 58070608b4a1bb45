"""What a quantization_config says of one module, read the obvious way and by nothing of ours: what
our readers of configs are held to when a config was changed.

Anything that is not plain to see raises Unclear, so that nothing is passed because both guess.
"""

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

from compress.quant.scheme import QuantScheme

Config = Mapping[str, Any]


class Unclear(Exception):
    """No plain meaning: whoever reads such a config is guessing."""


def block_of(config: Config, side: Config | None) -> Config:
    """The part of config.json that says how the model is quantized; {} without one.

    side: content of the file beside it, of which counts what config.json lacks.
    """
    below = (config.get(key) for key in ("text_config", "llm_config", "language_config"))
    inner = next((found for found in below if isinstance(found, dict) and found), {})
    for place in (config, inner):
        for key in ("quantization_config", "compression_config"):
            if isinstance(place.get(key), dict) and place[key]:
                return _completed(place[key], side)
    if not side:
        return {}
    return {"quant_method": "modelopt" if "quantization" in side else "gptq", **side}


def _completed(block: Config, side: Config | None) -> Config:
    """ModelOpt writes the size of groups to its other file only."""
    known = (side or {}).get("quantization")
    if block.get("quant_method") != "modelopt" or not isinstance(known, dict):
        return block
    return {**{k: v for k, v in known.items() if k == "group_size" and v is not None}, **block}


def format_of(block: Config) -> str:
    """A key of FORMATS."""
    if not block:
        return "bitsandbytes"  # the only one whose tensors say all
    method = block.get("quant_method")
    if not method:
        if block.get("load_in_8bit"):
            return "bitsandbytes"
        if "quant_algo" in block or "quantization" in block:
            return "modelopt"
        return "compressed-tensors" if "config_groups" in block else _unclear("no quant_method")
    name = _text(method).lower()
    stored = block.get("checkpoint_format") or block.get("format")
    if name == "gptq" and stored in ("gptq_v2", "gemm"):
        return "gptq_v2" if stored == "gptq_v2" else "awq"
    return name


def scheme_of(block: Config, module: str) -> QuantScheme | None:
    """How a module's weight is stored, inputs aside; None for a module that stays dense."""
    return _READERS[format_of(block)](block, module)


def _compressed_tensors(block: Config, module: str) -> QuantScheme | None:
    if _named(module, block.get("ignore") or []):
        return None
    groups = _mapping(block.get("config_groups")).values()
    targets = {target: group for group in groups for target in _list(group["targets"])}
    for hit in (
        lambda t: t == module,
        lambda t: t.startswith("re:") and re.match(t[3:], module),
        lambda t: t == "Linear",
    ):
        for target, group in targets.items():
            if hit(target):
                return _group(_mapping(group["weights"]))
    return None


def _group(weights: Config) -> QuantScheme:
    number, bits = weights.get("type", "int"), _whole(weights.get("num_bits", 8))
    size = weights.get("group_size")
    inferred = "tensor" if size is None else "group" if _whole(size) > 0 else "channel"
    strategy = weights.get("strategy") or inferred
    if strategy == "block":
        sides = weights["block_structure"]
        sides = [int(x) for x in (sides.split("x") if isinstance(sides, str) else sides)]
        return _square(sides)
    known = {"group": "group", "tensor_group": "group", "tensor": "tensor", "channel": "channel"}
    where: Any = known[strategy]
    symmetric = _flag(weights.get("symmetric", True))
    return QuantScheme(bits, symmetric, where, size if where == "group" else 0, None, number)


def _square(sides: list[int]) -> QuantScheme:
    across, down = sides
    if across != down:
        raise Unclear(f"blocks of {sides}")
    return QuantScheme(8, True, "block", across, None, "float")


def _gptq(block: Config, module: str) -> QuantScheme | None:
    rule = _rule(block, module)
    if rule is None:
        return None
    return _rows(_whole(rule["bits"]), _flag(rule.get("sym", True)), _whole(rule["group_size"]))


def _awq(block: Config, module: str) -> QuantScheme | None:
    rule = _rule(block, module)
    if rule is None or module in (block.get("modules_to_not_convert") or []):
        return None
    if rule.get("bits", rule.get("w_bit", 4)) != 4:
        raise Unclear("AWQ has 4 bits")
    zeros = _flag(rule.get("zero_point", not _flag(rule.get("sym", False))))
    return _rows(4, not zeros, _whole(rule.get("group_size", rule.get("q_group_size"))))


def _rows(bits: int, symmetric: bool, size: int) -> QuantScheme:
    return QuantScheme(bits, symmetric, "channel" if size == -1 else "group", max(size, 0))


def _rule(block: Config, module: str) -> Config | None:
    """The config as the first pattern that matches a module changes it, None for leave it."""
    for text, changes in _mapping(block.get("dynamic") or {}).items():
        sign, pattern = text[:2], text[2:] if text[:2] in ("+:", "-:") else text
        if re.match(pattern, module):
            return None if sign == "-:" else {**block, **changes}
    return block


def _fp8(block: Config, module: str) -> QuantScheme | None:
    for key in ("ignored_layers", "modules_to_not_convert"):
        for entry in block.get(key) or []:
            literal = r"[^\0]*".join(re.escape(x) for x in re.split(r"\.?\*", entry))
            if re.fullmatch(rf"(.*\.)?({literal})|({literal})(\..*)?", module):
                return None
            if entry.startswith("re:") and re.match(entry[3:], module):
                return None
    size = block.get("weight_block_size")
    return QuantScheme(8, True, "tensor", 0, None, "float") if size is None else _square(size)


_ALGORITHMS: Mapping[str, QuantScheme] = {
    "FP8": QuantScheme(8, True, "tensor", 0, None, "float"),
    "FP8_PER_CHANNEL_PER_TOKEN": QuantScheme(8, True, "channel", 0, None, "float"),
    "FP8_PB_WO": QuantScheme(8, True, "block", 128, None, "float"),
    "W4A16_NVFP4": QuantScheme(4, True, "group", 16, None, "float"),
    "NVFP4": QuantScheme(4, True, "group", 16, None, "float"),
    "W8A16": QuantScheme(8, True, "channel", 0),
    "W8A8_SQ_PER_CHANNEL": QuantScheme(8, True, "channel", 0),
}


def _modelopt(block: Config, module: str) -> QuantScheme | None:
    block = _mapping(block.get("quantization", block))
    ignored = block["ignore"] if "ignore" in block else block.get("exclude_modules")
    if any(fnmatch.fnmatchcase(module, entry) for entry in ignored or []):
        return None
    algorithm = _text(block["quant_algo"]).upper()
    if algorithm == "MIXED_PRECISION":
        layers = _mapping(block["quantized_layers"])
        if module not in layers:
            return None
        block, algorithm = layers[module], _text(layers[module]["quant_algo"]).upper()
    if _flag(block.get("has_zero_point", False)):
        raise Unclear("ModelOpt has no zero points")
    if algorithm == "W4A16_AWQ":
        size = block.get("group_size")
        return QuantScheme(4, True, "group", 128 if size is None else _whole(size))
    return _ALGORITHMS[algorithm]


def _bitsandbytes(block: Config, module: str) -> QuantScheme | None:
    if block.get("load_in_4bit") or not block.get("load_in_8bit", True):
        raise Unclear("4-bit bitsandbytes")
    skipped = block.get("llm_int8_skip_modules") or []
    return None if module in skipped else QuantScheme(8, True, "channel", 0)


_READERS = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "gptq_v2": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
}


def _named(module: str, entries: list[str]) -> bool:
    patterns = (x[3:] for x in entries if x.startswith("re:"))
    return module in entries or any(re.match(pattern, module) for pattern in patterns)


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else _unclear(value)


def _flag(value: object) -> bool:
    return value if isinstance(value, bool) else _unclear(value)


def _text(value: object) -> str:
    return value if isinstance(value, str) else _unclear(value)


def _mapping(value: object) -> Config:
    return value if isinstance(value, dict) else _unclear(value)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else _unclear(value)


def _unclear(value: object) -> Any:
    raise Unclear(f"{value!r} says nothing")
