"""compressed-tensors' quantization_config as other tools and we write it, read with suspicion.

It comes with the checkpoint: every value is checked before use, and what is wrong is named by its
place in config.json.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.errors import CheckpointError, RecipeError
from compress.formats.ct_config import INTEGER, MIXED, PACKED
from compress.formats.detect import find_block
from compress.quant.scheme import ActivationScheme, QuantScheme

READABLE = (PACKED, INTEGER, MIXED, "naive-quantized")


@dataclass(frozen=True, slots=True)
class SchemeMap:
    """The scheme of every module of a compressed checkpoint.

    groups: (targets, scheme) in the config's order. ignore: module names or "re:" patterns.
    transposed: modules that the original stores as [K, N] (GPT-2's Conv1D).
    """

    groups: tuple[tuple[tuple[str, ...], QuantScheme], ...]
    ignore: tuple[str, ...]
    transposed: frozenset[str]

    def scheme(self, module: str) -> QuantScheme | None:
        """Scheme of a module: a target that names it, then a pattern, then the class Linear."""
        if any(_matches(module, entry) for entry in self.ignore):
            return None
        exact = ((t, s) for targets, s in self.groups for t in targets if t == module)
        pattern = (
            (t, s)
            for targets, s in self.groups
            for t in targets
            if t.startswith("re:") and _matches(module, t)
        )
        classes = ((t, s) for targets, s in self.groups for t in targets if t == "Linear")
        for found in (exact, pattern, classes):
            for _, scheme in found:
                return scheme
        return None


def parse(config: Mapping[str, Any]) -> SchemeMap:
    """Schemes of a checkpoint whose config.json has a compressed-tensors quantization_config.

    CheckpointError, naming the key, for what is malformed or no integer scheme of ours.
    """
    found = find_block(config)
    if found is None:
        raise CheckpointError(
            f"config.json: quantization_config is {_shown(config.get('quantization_config'))},"
            " but there are compressed-tensors weights; it must be the mapping written with them"
        )
    place, block = found
    _require(f"{place}.format", block.get("format", PACKED), READABLE)
    place_groups = f"{place}.config_groups"
    groups = _mapping(place_groups, block.get("config_groups", {}))
    return SchemeMap(
        tuple(_group(f"{place_groups}.{name}", group) for name, group in groups.items()),
        _patterns(f"{place}.ignore", block.get("ignore")),
        frozenset(_names(f"{place}.transposed", block.get("transposed"))),
    )


def _group(place: str, value: object) -> tuple[tuple[str, ...], QuantScheme]:
    group = _mapping(place, value)
    targets = _patterns(f"{place}.targets", group.get("targets"))
    if not targets:
        raise CheckpointError(
            f"{place}.targets is {_shown(group.get('targets'))}; it must list the modules of the"
            " group, for example ['Linear']"
        )
    return targets, _scheme(place, group)


def _scheme(place: str, group: Mapping[str, Any]) -> QuantScheme:
    activation = _activation(f"{place}.input_activations", group.get("input_activations"))
    place = f"{place}.weights"
    weights = _mapping(place, group.get("weights"))
    _require(f"{place}.type", weights.get("type", "int"), ("int",))
    size = weights.get("group_size")
    if size is not None:
        _whole(f"{place}.group_size", size)
    granularity: Any = weights.get("strategy") or _strategy(size)
    _require(f"{place}.strategy", granularity, ("tensor", "channel", "group"))
    width = _whole(f"{place}.group_size", size) if granularity == "group" else 0
    try:
        return QuantScheme(
            bits=_whole(f"{place}.num_bits", weights.get("num_bits", 8)),
            symmetric=_flag(f"{place}.symmetric", weights.get("symmetric", True)),
            granularity=granularity,
            group_size=width,
            activation=activation,
        )
    except RecipeError as error:  # a width or group size that no scheme of ours has
        raise CheckpointError(f"{place}: {error}") from None


def _activation(place: str, value: object) -> ActivationScheme | None:
    if value is None:
        return None
    activations = _mapping(place, value)
    for key, allowed in (("type", "int"), ("strategy", "token"), ("dynamic", True)):
        _require(f"{place}.{key}", activations.get(key), (allowed,))
    _require(f"{place}.symmetric", activations.get("symmetric", True), (True,))
    bits = _whole(f"{place}.num_bits", activations.get("num_bits", 8))
    _require(f"{place}.num_bits", bits, tuple(range(2, 9)))
    return ActivationScheme(bits=bits)


def _strategy(group_size: int | None) -> str:
    """What compressed-tensors infers where the strategy is left out."""
    if group_size is None:
        return "tensor"
    return "group" if group_size > 0 else "channel"


def _require(place: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(a) for a in allowed)
        raise CheckpointError(f"{place} is {_shown(value)}; this version reads {choices}")


def _mapping(place: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{place} is {_shown(value)}; it must be a mapping")
    return value


def _whole(place: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"{place} is {_shown(value)}; it must be a whole number")
    return value


def _flag(place: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise CheckpointError(f"{place} is {_shown(value)}; it must be true or false")
    return value


def _names(place: str, value: object) -> tuple[str, ...]:
    """A list of texts; null is an empty one."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise CheckpointError(f"{place} is {_shown(value)}; it must be a list of module names")
    return tuple(value)


def _patterns(place: str, value: object) -> tuple[str, ...]:
    names = _names(place, value)
    for entry in names:
        try:
            _matches("", entry)
        except (re.error, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"{place}: {_shown(entry)} is not a regular expression: {error}"
            ) from None
    return names


def _matches(module: str, entry: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    return entry == module


def _shown(value: object) -> str:
    """A value of the config for a message, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
