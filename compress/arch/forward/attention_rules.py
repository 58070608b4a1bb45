"""Rules that families share: which layers rotate queries and keys how, and what scales products."""

from collections.abc import Callable, Mapping
from typing import Any

from compress.arch.forward.rope import Rope, RopeRule, read_rope, rope_of
from compress.arch.forward.values import flag, number, refuse
from compress.arch.forward.windows import (
    SLIDING,
    Windows,
    all_but_every_sixth,
    layer_types,
    rotates,
)
from compress.arch.spec import DecoderSpec

_Ropes = Callable[[Mapping[str, Any], DecoderSpec, int], list[Rope | None]]
# gemma3: the rotation of layers that see every position, and of those with a window.
_GLOBAL = RopeRule(theta=1_000_000.0)
_LOCAL = RopeRule(theta=10_000.0, theta_key="rope_local_base_freq")


def no_rotation(text: Mapping[str, Any], spec: DecoderSpec, layers: int) -> list[Rope | None]:
    """Positions are learned."""
    return [None] * layers


def one_rotation(rule: RopeRule) -> _Ropes:
    """All layers rotate alike."""

    def ropes(text: Mapping[str, Any], spec: DecoderSpec, layers: int) -> list[Rope | None]:
        return [rope_of(rule, text, spec.head_dim, spec.context)] * layers

    return ropes


def some_layers_rotate(rule: RopeRule) -> _Ropes:
    """smollm3: those that no_rope_layers has a 1 for."""

    def ropes(text: Mapping[str, Any], spec: DecoderSpec, layers: int) -> list[Rope | None]:
        rope = rope_of(rule, text, spec.head_dim, spec.context)
        return [rope if rotates(text, index) else None for index in range(layers)]

    return ropes


def by_two_rotations(text: Mapping[str, Any], spec: DecoderSpec, layers: int) -> list[Rope | None]:
    """gemma3: layers with a window have frequencies of their own."""
    given = text.get("rope_parameters")
    default: dict[str, Any] = {"rope_type": "default"}
    parts = {SLIDING: default, "full_attention": default} if given is None else given
    if not isinstance(parts, Mapping) or not all(
        part is None or isinstance(part, Mapping) for part in parts.values()
    ):
        raise refuse("rope_parameters", given, f"it must have {SLIDING} and full_attention")
    full = {**(parts.get("full_attention") or default), **(text.get("rope_scaling") or {})}
    local = parts.get(SLIDING) or default
    found = {
        SLIDING: (_LOCAL, local, f"rope_parameters.{SLIDING}"),
        "full_attention": (_GLOBAL, full, "rope_parameters.full_attention"),
    }
    ropes = {
        kind: read_rope(rule, text, parameters, place, spec.head_dim, spec.context)
        for kind, (rule, parameters, place) in found.items()
    }
    types = layer_types(Windows(None, slides=all_but_every_sixth), text, layers)
    return [ropes[SLIDING if kind == SLIDING else "full_attention"] for kind in types]


def by_head_dim(text: Mapping[str, Any], head_dim: int, layer: int) -> float:
    return float(head_dim**-0.5)


def by_scalar(text: Mapping[str, Any], head_dim: int, layer: int) -> float:
    """gemma: a number of its own in place of head_dim."""
    return float(number(text, "query_pre_attn_scalar", 256.0) ** -0.5)


def gpt2_scale(text: Mapping[str, Any], head_dim: int, layer: int) -> float:
    scale = float(head_dim**-0.5) if flag(text, "scale_attn_weights", True) else 1.0
    return scale / (layer + 1) if flag(text, "scale_attn_by_inverse_layer_idx", False) else scale
