"""Rules that families share: which layers rotate queries and keys how, and what scales products."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from compress.arch.forward.rope import NAMES, Rope, RopeRule, read_rope, rope_of, yarn_scale
from compress.arch.forward.values import flag, number, refuse
from compress.arch.forward.windows import (
    SLIDING,
    Windows,
    all_but_every_sixth,
    layer_types,
    rotates,
)
from compress.arch.spec import DecoderSpec

_T = TypeVar("_T")
_Ropes = Callable[[Mapping[str, Any], DecoderSpec], list[Rope | None]]
# gemma3: the rotation of layers that see every position, and of those with a window.
_GLOBAL = RopeRule(theta=1_000_000.0)
_LOCAL = RopeRule(theta=10_000.0, theta_key="rope_local_base_freq")


def no_rotation(text: Mapping[str, Any], spec: DecoderSpec) -> list[Rope | None]:
    """Positions are learned."""
    return [None] * len(spec.blocks)


def one_rotation(rule: RopeRule) -> _Ropes:
    """All layers rotate alike."""

    def ropes(text: Mapping[str, Any], spec: DecoderSpec) -> list[Rope | None]:
        of = _by_width(spec, lambda width: rope_of(rule, text, width, spec.context))
        return [of[block.sizes.rotated] for block in spec.blocks]

    return ropes


def some_layers_rotate(rule: RopeRule) -> _Ropes:
    """smollm3: those that no_rope_layers has a 1 for."""

    def ropes(text: Mapping[str, Any], spec: DecoderSpec) -> list[Rope | None]:
        of = _by_width(spec, lambda width: rope_of(rule, text, width, spec.context))
        return [of[x.sizes.key_width] if rotates(text, x.index) else None for x in spec.blocks]

    return ropes


def by_two_rotations(text: Mapping[str, Any], spec: DecoderSpec) -> list[Rope | None]:
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

    def ropes(width: int) -> dict[str, Rope]:
        return {
            kind: read_rope(rule, text, parameters, place, width, spec.context)
            for kind, (rule, parameters, place) in found.items()
        }

    of = _by_width(spec, ropes)
    types = layer_types(Windows(None, slides=all_but_every_sixth), text, len(spec.blocks))
    return [
        of[block.sizes.key_width][SLIDING if kind == SLIDING else "full_attention"]
        for block, kind in zip(spec.blocks, types, strict=True)
    ]


def _by_width(spec: DecoderSpec, make: Callable[[int], _T]) -> dict[int, _T]:
    """What is made for each width of heads that there is, once."""
    return {width: make(width) for width in {block.sizes.rotated for block in spec.blocks}}


def by_head_dim(text: Mapping[str, Any], head_dim: int, layer: int) -> float:
    return float(head_dim**-0.5)


def by_stretched_head_dim(text: Mapping[str, Any], head_dim: int, layer: int) -> float:
    """deepseek_v3: a rotation that stretches contexts makes attention sharper, whatever its kind
    is (yarn's mscale, squared)."""
    scale = by_head_dim(text, head_dim, layer)
    given: Mapping[str, Any] = next((text[name] for name in NAMES if text.get(name)), {})
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default" or not given.get("mscale_all_dim"):
        return scale
    place = "rope_parameters"
    factor = number(given, "factor", None, f"{place}.factor")
    sharper = number(given, "mscale_all_dim", None, f"{place}.mscale_all_dim")
    return scale * yarn_scale(factor, sharper) ** 2


def by_scalar(text: Mapping[str, Any], head_dim: int, layer: int) -> float:
    """gemma: a number of its own in place of head_dim."""
    return float(number(text, "query_pre_attn_scalar", 256.0) ** -0.5)


def gpt2_scale(text: Mapping[str, Any], head_dim: int, layer: int) -> float:
    scale = float(head_dim**-0.5) if flag(text, "scale_attn_weights", True) else 1.0
    return scale / (layer + 1) if flag(text, "scale_attn_by_inverse_layer_idx", False) else scale
