"""compressed-tensors' quantization_config: which module has which scheme, both ways.

Written without null values and without keys that say nothing: readers of other versions refuse
keys that they do not know. Modules go by the names of the checkpoint, as vLLM compares them.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.arch.spec import DecoderSpec, LinearSpec
from compress.errors import CheckpointError
from compress.formats.compressed_tensors import NAME, is_packed, module_of
from compress.quant.scheme import ActivationScheme, QuantScheme

PACKED, INTEGER, MIXED = "pack-quantized", "int-quantized", "mixed-precision"
READABLE = (PACKED, INTEGER, MIXED, "naive-quantized")
# Oldest compressed-tensors that reads it right (transformers 5 wants 0.15 anyway).
_VERSION, _VERSION_ODD_BITS = "0.15.0", "0.18.0"

_Key = tuple[QuantScheme, bool]  # scheme, has g_idx


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


def quantization_config(
    spec: DecoderSpec,
    shapes: Mapping[str, tuple[int, ...]],
    schemes: Mapping[str, QuantScheme],
    *,
    with_g_idx: Collection[str] = (),
) -> dict[str, Any] | None:
    """The `quantization_config` of config.json; None when nothing is quantized.

    shapes: of every tensor of the source. schemes: of every quantized tensor, by tensor name.
    with_g_idx: those of them that carry a g_idx (act-order "group").
    """
    if not schemes:
        return None
    linears = {linear.tensor: linear for linear in spec.all_linears() if linear.tensor in schemes}
    members: dict[_Key, list[LinearSpec]] = {}
    for tensor, linear in linears.items():
        members.setdefault((schemes[tensor], tensor in with_g_idx), []).append(linear)
    formats = sorted({_format(scheme) for scheme, _ in members})
    whole = len(members) == 1
    groups = {
        f"group_{i}": {
            "targets": _everything(found) if whole else targets(found, linears.values()),
            **({"format": _format(scheme)} if len(formats) > 1 else {}),
            **_scheme_to_config(scheme, g_idx),
        }
        for i, ((scheme, g_idx), found) in enumerate(members.items())
    }
    odd = any(32 % s.bits for s in schemes.values() if is_packed(s))
    transposed = [linear.name for linear in linears.values() if linear.transposed]
    return {
        "quant_method": NAME,
        "version": _VERSION_ODD_BITS if odd else _VERSION,
        "format": formats[0] if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "ignore": ignored_modules(spec, shapes, schemes),
        "config_groups": groups,
        **({"transposed": transposed} if transposed else {}),
    }


def ignored_modules(
    spec: DecoderSpec, shapes: Mapping[str, tuple[int, ...]], quantized: Collection[str]
) -> list[str]:
    """Modules with a weight matrix that is not quantized, by checkpoint name.

    Embeddings are left out: no target of ours matches them. A tied head has no tensor, yet its
    runtimes build a Linear for it, "lm_head" in all of them.
    """
    embeddings = {name for name, _ in spec.outside if name != spec.head} | {spec.embedding}
    names = [
        module_of(name)
        for name, shape in shapes.items()
        if len(shape) == 2
        and name.endswith(".weight")
        and name not in quantized
        and name not in embeddings
    ]
    return names if spec.head is not None else [*names, "lm_head"]


def _everything(found: Sequence[LinearSpec]) -> list[str]:
    """Targets of a config with one group. The head goes by its name: vLLM has no Linear for it."""
    return ["Linear", *(linear.name for linear in found if linear.role == "head")]


def targets(found: Sequence[LinearSpec], quantized: Iterable[LinearSpec]) -> list[str]:
    """Module names; one pattern for all experts of a layer where they share the scheme.

    Patterns because transformers recognises the group of the experts only by a "re:" target.
    """
    everyone = {_expert_pattern(x): 0 for x in found}
    for linear in quantized:
        if (pattern := _expert_pattern(linear)) in everyone:
            everyone[pattern] += 1
    mine: dict[str | None, int] = {}
    for linear in found:
        pattern = _expert_pattern(linear)
        mine[pattern] = mine.get(pattern, 0) + 1
    result: dict[str, None] = {}
    for linear in found:
        pattern = _expert_pattern(linear)
        together = pattern is not None and mine[pattern] == everyone[pattern]
        result[pattern if together and pattern is not None else linear.name] = None
    return list(result)


def parse(config: Mapping[str, Any]) -> SchemeMap:
    """Schemes of a checkpoint whose config.json has a compressed-tensors quantization_config.

    CheckpointError, naming the key, for what is not an integer scheme of ours.
    """
    block = config["quantization_config"]
    if block.get("format", PACKED) not in READABLE:
        raise CheckpointError(
            f"quantization_config.format is {block['format']!r}; this version reads"
            f" {', '.join(READABLE)}"
        )
    groups = tuple(
        (tuple(group["targets"]), _scheme_from_config(name, group))
        for name, group in block.get("config_groups", {}).items()
    )
    return SchemeMap(
        groups, tuple(block.get("ignore") or ()), frozenset(block.get("transposed", ()))
    )


def _format(scheme: QuantScheme) -> str:
    return PACKED if is_packed(scheme) else INTEGER


def _scheme_to_config(scheme: QuantScheme, g_idx: bool) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": scheme.granularity,
        "dynamic": False,
    }
    if scheme.granularity == "group":
        weights["group_size"] = scheme.group_size
    if g_idx:
        weights["actorder"] = "group"
    if scheme.activation is None:
        return {"weights": weights}
    activations = {
        "num_bits": scheme.activation.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    return {"weights": weights, "input_activations": activations}


def _scheme_from_config(name: str, group: Mapping[str, Any]) -> QuantScheme:
    place = f"quantization_config.config_groups.{name}"
    weights = group.get("weights") or {}
    _require(f"{place}.weights.type", weights.get("type", "int"), ("int",))
    granularity: Any = weights.get("strategy") or _strategy(weights.get("group_size"))
    _require(f"{place}.weights.strategy", granularity, ("tensor", "channel", "group"))
    return QuantScheme(
        bits=weights.get("num_bits", 8),
        symmetric=weights.get("symmetric", True),
        granularity=granularity,
        group_size=weights["group_size"] if granularity == "group" else 0,
        activation=_activation_from_config(place, group.get("input_activations")),
    )


def _activation_from_config(
    place: str, activations: Mapping[str, Any] | None
) -> ActivationScheme | None:
    if activations is None:
        return None
    for key, allowed in (("type", "int"), ("strategy", "token"), ("dynamic", True)):
        _require(f"{place}.input_activations.{key}", activations.get(key), (allowed,))
    _require(f"{place}.input_activations.symmetric", activations.get("symmetric", True), (True,))
    return ActivationScheme(bits=activations.get("num_bits", 8))


def _strategy(group_size: int | None) -> str:
    """What compressed-tensors infers where the strategy is left out."""
    if group_size is None:
        return "tensor"
    return "group" if group_size > 0 else "channel"


def _require(place: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(a) for a in allowed)
        raise CheckpointError(f"{place} is {value!r}; this version reads {choices}")


def _matches(module: str, entry: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    return entry == module


def _expert_pattern(linear: LinearSpec) -> str | None:
    """ "re:" pattern of the same linear in every expert of the layer, None outside a mixture."""
    if linear.expert is None:
        return None
    before, found, after = linear.name.rpartition(f".{linear.expert}.")
    return rf"re:^{re.escape(before)}\.\d+\.{re.escape(after)}$" if found else None
