"""Which layers of a decoder see a window of positions only, and how wide it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from compress.arch.forward.values import flag, refuse, whole

SLIDING = "sliding_attention"
# What transformers calls a layer that sees every position before it.
FULL = ("full_attention", "attention")


@dataclass(frozen=True, slots=True)
class Windows:
    """default: width where config.json has no sliding_window; null means no window.

    switch: use_sliding_window turns them on, and is off when absent.
    slides: whether a layer has one where config.json has no layer_types; None for a family whose
        layers all have one, and that has no layer_types.
    """

    default: int | None
    switch: bool = False
    slides: Callable[[Mapping[str, Any], int], bool] | None = None


def windows_of(rule: Windows | None, text: Mapping[str, Any], layers: int) -> list[int | None]:
    """For each layer the positions that a token sees, itself included; None for all.

    Raises CheckpointError for layer types other than the two, and for a layer with a window but no
    width.
    """
    if rule is None:
        return [None] * layers
    width = _width(rule, text)
    if rule.slides is None:
        return [width] * layers
    types = layer_types(rule, text, layers)
    if width is None and SLIDING in types:
        raise refuse(
            "sliding_window",
            text.get("sliding_window"),
            f"layer_types has {SLIDING}, which needs its width, and use_sliding_window true where"
            " the model has that key",
        )
    return [width if kind == SLIDING else None for kind in types]


def layer_types(rule: Windows, text: Mapping[str, Any], layers: int) -> list[str]:
    """What each layer's attention is called: given, or by the family's pattern."""
    given = text.get("layer_types")
    if given is None:
        assert rule.slides is not None
        return [SLIDING if rule.slides(text, index) else FULL[0] for index in range(layers)]
    if not isinstance(given, list) or len(given) != layers:
        raise refuse("layer_types", given, f"it must be a list of {layers} names, one a layer")
    for index, kind in enumerate(given):
        if kind not in (SLIDING, *FULL):
            place = f"layer_types[{index}]"
            raise refuse(place, kind, f"layers of {SLIDING} and {FULL[0]} are known")
    return given


def _width(rule: Windows, text: Mapping[str, Any]) -> int | None:
    if rule.switch and not flag(text, "use_sliding_window", False):
        return None
    given = text.get("sliding_window", rule.default)
    return None if given is None else whole({"sliding_window": given}, "sliding_window", None)


def behind_the_first(text: Mapping[str, Any], index: int) -> bool:
    """qwen2, qwen3: all but the first max_window_layers."""
    if not flag(text, "use_sliding_window", False) or text.get("sliding_window", 0) is None:
        return False
    first = text.get("max_window_layers")
    return index >= (28 if first is None else first)


def every_other(text: Mapping[str, Any], index: int) -> bool:
    """gemma2: the first, the third, ..."""
    return (index + 1) % 2 > 0


def where_there_is_a_width(text: Mapping[str, Any], index: int) -> bool:
    """ministral: all, unless sliding_window is null."""
    return text.get("sliding_window", 0) is not None


def all_but_every_fourth(text: Mapping[str, Any], index: int) -> bool:
    """cwm: the first, the fifth, ... see every position."""
    return index % 4 > 0


def all_but_every_sixth(text: Mapping[str, Any], index: int) -> bool:
    """gemma3, whose older configs name another distance."""
    return (index + 1) % whole(text, "sliding_window_pattern", 6) > 0


def without_rotation(text: Mapping[str, Any], index: int) -> bool:
    """smollm3: where positions are not rotated."""
    on = flag(text, "use_sliding_window", False) and text.get("sliding_window") is not None
    return on and not rotates(text, index)


def rotates(text: Mapping[str, Any], index: int) -> bool:
    """Whether a layer of smollm3 rotates its queries and keys."""
    given = text.get("no_rope_layers")  # 1 where there is a rotation, despite the name
    if given is None:
        return (index + 1) % whole(text, "no_rope_layer_interval", 4) > 0
    if not isinstance(given, list) or len(given) <= index or given[index] not in (0, 1):
        raise refuse("no_rope_layers", given, "it must be a list with 0 or 1 for each layer")
    return bool(given[index])
