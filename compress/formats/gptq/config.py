"""GPTQ's quantization_config, written and read: one scheme for all, and rules for the others.

`dynamic` maps regular expressions, matched from the start of a module's name, to what is different
there: "+:regex" to keys of the config, "-:regex" (not quantized) to nothing. The first one that
matches counts.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from compress.arch.spec import DecoderSpec, LinearSpec
from compress.checkpoint.detect import find_block
from compress.errors import CheckpointError, RecipeError
from compress.expressions import Expression
from compress.formats.compressed_tensors.config import HEAD, ignored_modules
from compress.formats.config_values import (
    flag,
    made,
    mapping,
    names,
    pattern,
    require,
    shown,
    whole,
)
from compress.quant.scheme import QuantScheme
from compress.version import VERSION

METHOD = "gptq"  # quant_method of both versions
V1, V2 = "gptq", "gptq_v2"
BITS = (2, 3, 4, 8)
# What vLLM calls linears that it multiplies with as one, by the role of a part.
_FUSED = {
    "q": "qkv_proj",
    "k": "qkv_proj",
    "v": "qkv_proj",
    "gate": "gate_up_proj",
    "up": "gate_up_proj",
}

Key = tuple[QuantScheme, bool]  # scheme, desc_act
_Said = TypeVar("_Said")


@dataclass(frozen=True, slots=True)
class GptqSchemes:
    """rules: in the config's order; None for modules that are not quantized."""

    base: Key
    rules: tuple[tuple[Expression, Key | None], ...]
    transposed: frozenset[str]

    def scheme(self, module: str) -> QuantScheme | None:
        key = self._key(module)
        return None if key is None else key[0]

    def reorders(self, module: str) -> bool:
        """Whether loaders heed the g_idx of a module (desc_act)."""
        key = self._key(module)
        return key is not None and key[1]

    def _key(self, module: str) -> Key | None:
        return next((key for found, key in self.rules if found.match(module)), self.base)


def quantization_config(
    spec: DecoderSpec,
    shapes: Mapping[str, tuple[int, ...]],
    schemes: Mapping[str, QuantScheme],
    *,
    with_g_idx: Collection[str] = (),
    kv_cache: object = None,
    version: str = V1,
) -> dict[str, Any] | None:
    """The `quantization_config` of config.json and content of quantize_config.json; None when
    nothing is quantized.

    shapes: of every tensor of the source. schemes: of every quantized tensor, by tensor name.
    with_g_idx: those of them that carry act-order "group". "transposed" is ours: modules that the
    source stores as [K, N]. RecipeError for a quantized cache or embedding.
    """
    refuse_others(version, spec, schemes, kv_cache)
    if not schemes:
        return None
    members = {
        linear.name: (schemes[linear.tensor], linear.tensor in with_g_idx)
        for linear in spec.all_linears()
        if linear.tensor in schemes
    }
    (base, desc_act), _ = Counter(members.values()).most_common(1)[0]
    dynamic = rules(spec, shapes, members, (base, desc_act))
    transposed = [x.name for x in spec.all_linears() if x.transposed and x.tensor in schemes]
    return {
        "quant_method": METHOD,
        **_keys(base, desc_act),
        "lm_head": spec.head in schemes,
        "checkpoint_format": version,
        "format": version,
        "pack_dtype": "int32",
        **({"dynamic": dynamic} if dynamic else {}),
        "meta": {"quantizer": [f"compress-model:{VERSION}"]},
        **({"transposed": transposed} if transposed else {}),
    }


def refuse_others(
    name: str, spec: DecoderSpec, schemes: Mapping[str, object], kv_cache: object
) -> None:
    """RecipeError for what neither GPTQ's nor AWQ's format has a place for."""
    if kv_cache is not None:
        raise RecipeError(
            f"kv_cache: {name} has no place for the scales of the key/value cache; use"
            " output.format 'compressed-tensors'"
        )
    if spec.embedding in schemes and spec.embedding != spec.head:
        raise RecipeError(
            f"{spec.embedding}: {name} has no place for a quantized embedding; use output.format"
            " 'compressed-tensors', or leave it out"
        )


def _keys(scheme: QuantScheme, desc_act: bool) -> dict[str, Any]:
    return {
        "bits": scheme.bits,
        "group_size": scheme.group_size if scheme.granularity == "group" else -1,
        "desc_act": desc_act,
        "sym": scheme.symmetric,
    }


def rules(
    spec: DecoderSpec,
    shapes: Mapping[str, tuple[int, ...]],
    members: Mapping[str, Key],
    base: Key,
) -> dict[str, dict[str, Any]]:
    """`dynamic`: one regular expression for a module of all layers where it can be.

    shapes: of every tensor of the source. members: scheme and desc_act of every quantized module.
    """
    quantized = {f"{name}.weight" for name in members}
    # A head that stays dense needs no rule: "lm_head" is false then.
    heads = {HEAD, (spec.head or "").removesuffix(".weight")}
    dense = [name for name in ignored_modules(spec, shapes, quantized) if name not in heads]
    keys: dict[str, Key | None] = {**dict.fromkeys(dense), **members}
    keys |= dict(_fused(spec, keys))
    kinds: dict[str, set[Key | None]] = {}
    for name, key in keys.items():
        kinds.setdefault(_kind(name), set()).add(key)
    found: dict[str, dict[str, Any]] = {}
    for name, key in keys.items():
        if key != base:
            where = _kind(name) if len(kinds[_kind(name)]) == 1 else re.escape(name)
            found[f"{'-' if key is None else '+'}:^{where}$"] = {} if key is None else _keys(*key)
    return found


def _kind(name: str) -> str:
    """Regular expression of a module in any layer and of any expert."""
    return re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(name))


def _fused(spec: DecoderSpec, keys: Mapping[str, Key | None]) -> Iterator[tuple[str, Key | None]]:
    """Modules as vLLM fuses them, and all experts of a layer, where their parts are alike."""
    parts: dict[str, set[Key | None]] = {}
    for linear in spec.linears():
        for name in _names_when_fused(linear):
            parts.setdefault(name, set()).add(keys.get(linear.name))
    for name, found in parts.items():
        if len(found) == 1:
            yield name, found.pop()


def _names_when_fused(linear: LinearSpec) -> Iterator[str]:
    if linear.expert is not None:
        before, found, _ = linear.name.rpartition(f".{linear.expert}.")
        if found:
            yield before
    elif linear.fused is not None and linear.role in _FUSED:
        yield f"{linear.name.rpartition('.')[0]}.{_FUSED[linear.role]}"


def read_schemes(config: Mapping[str, Any]) -> GptqSchemes:
    """Schemes of a checkpoint whose config.json has a GPTQ quantization_config of either version.

    CheckpointError, naming the key, for what is malformed or no scheme of ours.
    """
    place, block = find_block(config) or ("quantization_config", {})
    version = block.get("checkpoint_format") or block.get("format") or V1
    require(f"{place}.checkpoint_format", version, (V1, V2))
    # transformers and gptqmodel prefer different ones of the two.
    require(f"{place}.format", block.get("format") or version, (version,))
    require(f"{place}.pack_dtype", block.get("pack_dtype", "int32"), ("int32",))
    flag(f"{place}.lm_head", block.get("lm_head") or False)
    return GptqSchemes(
        _key_of(place, block),
        read_rules(place, block, _key_of),
        frozenset(names(f"{place}.transposed", block.get("transposed"))),
    )


def read_rules(
    place: str, block: Mapping[str, Any], read: Callable[[str, Mapping[str, Any]], _Said]
) -> tuple[tuple[Expression, _Said | None], ...]:
    """`dynamic` of a block, in its order: what `read` makes of the block as a rule changes it, None
    for modules that are not quantized. place: of the block; `read` gets the rule's."""
    place, rules = f"{place}.dynamic", block.get("dynamic")
    found: list[tuple[Expression, _Said | None]] = []
    for text, changes in ({} if rules is None else mapping(place, rules)).items():
        if text.startswith("-:"):
            found.append((pattern(place, text, "-:"), None))
        else:
            where = f"{place}[{shown(text)}]"
            said = read(where, {**block, **mapping(where, changes)})
            found.append((pattern(place, text, "+:"), said))
    return tuple(found)


def _key_of(place: str, block: Mapping[str, Any]) -> Key:
    bits = whole(f"{place}.bits", block.get("bits"))
    require(f"{place}.bits", bits, BITS)
    symmetric = flag(f"{place}.sym", block.get("sym", True))
    desc_act = flag(f"{place}.desc_act", block.get("desc_act", False))
    return scheme_of(place, bits, symmetric, block.get("group_size")), desc_act


def scheme_of(place: str, bits: int, symmetric: bool, group_size: object) -> QuantScheme:
    """Scheme of integers in groups; a group_size of -1 means one scale a channel."""
    size = whole(f"{place}.group_size", group_size)
    if size != -1 and size < 1:
        raise CheckpointError(
            f"{place}.group_size is {size}; it must be 1 or more, or -1 for one scale a channel"
        )
    return made(
        place,
        lambda: QuantScheme(
            bits=bits,
            symmetric=symmetric,
            granularity="channel" if size == -1 else "group",
            group_size=max(size, 0),
        ),
    )
