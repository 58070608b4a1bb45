"""compressed-tensors' quantization_config as other tools and we write it, read with suspicion.

It comes with the checkpoint: every value is checked before use, and what is wrong is named by its
place in config.json.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compress.arch.generic import EMBEDDINGS
from compress.checkpoint.detect import find_block
from compress.errors import CheckpointError
from compress.expressions import Expression
from compress.formats.compressed_tensors.config import DENSE, MIXED
from compress.formats.compressed_tensors.encode import FLOAT, INTEGER, NVFP4, PACKED
from compress.formats.config_values import (
    flag,
    made,
    mapping,
    names,
    names_or_patterns,
    pattern,
    require,
    shown,
    whole,
)
from compress.quant.scheme import ActivationScheme, QuantScheme

READABLE = (PACKED, INTEGER, FLOAT, NVFP4, MIXED, DENSE, "naive-quantized")
# What `scale_dtype` may say, in any of its spellings; NVFP4's scales are E4M3.
_SCALE_DTYPES = (None, "bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class SchemeMap:
    """The scheme of every module of a compressed checkpoint.

    groups: (targets, scheme) in the config's order. ignore: module names or "re:" patterns.
    transposed: modules that the original stores as [K, N] (GPT-2's Conv1D). kv_cache: how the
    key/value cache is quantized, None when it is not. ordered: places in `groups` of those whose
    columns have an order of their own (act-order "group").
    """

    groups: tuple[tuple[tuple[str, ...], QuantScheme], ...]
    ignore: tuple[str, ...]
    transposed: frozenset[str]
    kv_cache: ActivationScheme | None = None
    ordered: frozenset[int] = frozenset()
    _expressions: dict[str, Expression] = field(default_factory=dict, compare=False, repr=False)

    def scheme(self, module: str) -> QuantScheme | None:
        """Scheme of a module: a target that names it, then a pattern, then its class."""
        place = self._place(module)
        return None if place is None else self.groups[place][1]

    def reorders(self, module: str) -> bool:
        """Whether the columns of a module are said to have an order of their own (g_idx)."""
        return self._place(module) in self.ordered

    def _place(self, module: str) -> int | None:
        if any(self._matches(module, entry) for entry in self.ignore):
            return None
        # A target of two groups is the last one's, as in compressed-tensors and vLLM.
        targets = {t: i for i, (targets, _) in enumerate(self.groups) for t in targets}
        patterns = (i for t, i in targets.items() if _is_pattern(t) and self._matches(module, t))
        last = targets.get(_class_of(module))
        return targets[module] if module in targets else next(patterns, last)

    def _matches(self, module: str, entry: str) -> bool:
        """CheckpointError for a pattern that takes too long on all modules together."""
        if not _is_pattern(entry):
            return entry == module
        if entry not in self._expressions:
            self._expressions[entry] = pattern("config.json: quantization_config", entry, "re:")
        return self._expressions[entry].match(module)


def _is_pattern(entry: str) -> bool:
    return entry.startswith("re:")


def _class_of(module: str) -> str:
    """What a target calls the class of a module, of which only the name is known."""
    return "Embedding" if module.rpartition(".")[2] in EMBEDDINGS else "Linear"


def parse(config: Mapping[str, Any]) -> SchemeMap:
    """Schemes of a checkpoint whose config.json has a compressed-tensors quantization_config.

    CheckpointError, naming the key, for what is malformed or no scheme of ours.
    """
    found = find_block(config)
    if found is None:
        raise CheckpointError(
            f"config.json: quantization_config is {shown(config.get('quantization_config'))},"
            " but there are compressed-tensors weights; it must be the mapping written with them"
        )
    place, block = found
    require(f"{place}.format", block.get("format", PACKED), READABLE)
    place_groups = f"{place}.config_groups"
    groups = mapping(place_groups, block.get("config_groups", {}))
    _refuse_transforms(f"{place}.transform_config", block.get("transform_config"))
    _refuse_sparsity(f"{place}.sparsity_config", block.get("sparsity_config"))
    return SchemeMap(
        tuple(_group(f"{place_groups}.{name}", group) for name, group in groups.items()),
        names_or_patterns(f"{place}.ignore", block.get("ignore")),
        frozenset(names(f"{place}.transposed", block.get("transposed"))),
        _kv_cache(f"{place}.kv_cache_scheme", block.get("kv_cache_scheme")),
        frozenset(i for i, group in enumerate(groups.values()) if _is_ordered(group)),
    )


def _refuse_transforms(place: str, value: object) -> None:
    """Rotations that the runtime applies to inputs: without them the weights are others."""
    if value is None or not mapping(place, value).get("config_groups"):
        return
    raise CheckpointError(
        f"{place} is {shown(value)}; weights that are read without these transforms are not the"
        " model's, and this version knows none, so take the original"
    )


def _refuse_sparsity(place: str, value: object) -> None:
    """Weights of which only some values are stored."""
    if value is not None:
        require(f"{place}.format", mapping(place, value).get("format"), (None, "dense"))


def _is_ordered(group: Mapping[str, Any]) -> bool:
    """true is what "group" was called at first; other words mean an order that is not stored."""
    return str(group["weights"].get("actorder")).lower() in ("group", "dynamic", "true")


def _group(place: str, value: object) -> tuple[tuple[str, ...], QuantScheme]:
    group = mapping(place, value)
    targets = names_or_patterns(f"{place}.targets", group.get("targets"))
    if not targets:
        raise CheckpointError(
            f"{place}.targets is {shown(group.get('targets'))}; it must list the modules of the"
            " group, for example ['Linear']"
        )
    return targets, _scheme(place, group)


def _scheme(place: str, group: Mapping[str, Any]) -> QuantScheme:
    require(f"{place}.format", group.get("format"), (None, *READABLE))
    require(f"{place}.output_activations", group.get("output_activations"), (None,))
    activation = _activation(f"{place}.input_activations", group.get("input_activations"))
    place = f"{place}.weights"
    weights = mapping(place, group.get("weights"))
    number: Any = weights.get("type", "int")
    require(f"{place}.type", number, ("int", "float"))
    bits = whole(f"{place}.num_bits", weights.get("num_bits", 8))
    fp4 = number == "float" and bits == 4
    _scale_dtype(f"{place}.scale_dtype", weights.get("scale_dtype"), fp4)
    granularity, width = _granularity(place, weights, fp4)
    return made(
        place,
        lambda: QuantScheme(
            bits=bits,
            symmetric=flag(f"{place}.symmetric", weights.get("symmetric", True)),
            granularity=granularity,
            group_size=width,
            activation=activation,
            type=number,
        ),
    )


def _granularity(place: str, weights: Mapping[str, Any], fp4: bool) -> tuple[Any, int]:
    """Granularity and group size of a scheme of ours."""
    size = weights.get("group_size")
    if size is not None:
        whole(f"{place}.group_size", size)
    strategy = weights.get("strategy") or _strategy(size)
    # 4-bit floats in plain groups are MXFP4, whose scales are powers of two.
    known = ("tensor_group",) if fp4 else ("tensor", "channel", "group", "block")
    require(f"{place}.strategy", strategy, known)
    if strategy == "block":
        return "block", _block(f"{place}.block_structure", weights.get("block_structure"))
    if strategy in ("group", "tensor_group"):
        return "group", whole(f"{place}.group_size", size)
    return strategy, 0


def _block(place: str, value: object) -> int:
    """Side of a square block from [128, 128] or, in old configs, "128x128"."""
    found = value.split("x") if isinstance(value, str) else value
    sides = [str(side) for side in found] if isinstance(found, list) else []
    if len(sides) != 2 or sides[0] != sides[1] or not re.fullmatch("[0-9]{1,9}", sides[0]):
        raise CheckpointError(
            f"{place} is {shown(value)}; this version reads square blocks such as [128, 128]"
        )
    return int(sides[0])


def _scale_dtype(place: str, value: object, fp4: bool) -> None:
    plain = value.removeprefix("torch.") if isinstance(value, str) else value
    require(place, plain, (None, "float8_e4m3fn") if fp4 else _SCALE_DTYPES)


def _activation(place: str, value: object) -> ActivationScheme | None:
    if value is None:
        return None
    inputs = mapping(place, value)
    number: Any = inputs.get("type", "int")
    require(f"{place}.type", number, ("int", "float"))
    require(f"{place}.symmetric", inputs.get("symmetric", True), (True,))
    size = inputs.get("group_size")
    granularity: Any = inputs.get("strategy") or _strategy(size)
    require(f"{place}.strategy", granularity, ("token", "tensor", "group"))
    width = whole(f"{place}.group_size", size) if granularity == "group" else 0
    bits = whole(f"{place}.num_bits", inputs.get("num_bits", 8))
    dynamic = flag(f"{place}.dynamic", inputs.get("dynamic", False))
    return made(
        place,
        lambda: ActivationScheme(
            bits=bits, type=number, granularity=granularity, group_size=width, dynamic=dynamic
        ),
    )


def _kv_cache(place: str, value: object) -> ActivationScheme | None:
    cache = _activation(place, value)
    if cache is not None:
        require(f"{place}.num_bits", cache.bits, (8,))
        require(f"{place}.dynamic", cache.dynamic, (False,))
    return cache


def _strategy(group_size: object) -> str:
    """What compressed-tensors infers where the strategy is left out."""
    if not isinstance(group_size, int):
        return "tensor"
    return "group" if group_size > 0 else "channel"
