"""How a stage says `scheme`: a preset's name or a mapping, with the group beside it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compress.quant.scheme import PRESETS, QuantScheme
from compress.recipe.reading.reader import (
    check_keys,
    field_names,
    make,
    mapping,
    missing,
    nearest,
    read_fields,
)
from compress.recipe.reading.tree import Node, Scalar, problem

SCHEME_KEYS = ("scheme", "granularity", "group_size")
# What an override may change of its stage's scheme.
CHANGES = ("bits", "symmetric", "granularity", "group_size")


def read_scheme(stage: Node, keys: Mapping[str, Node]) -> QuantScheme:
    """The scheme of a stage whose mapping is `keys`, complete.

    `group_size` beside a per-channel preset makes groups; `granularity: channel` (or tensor)
    beside a grouped one drops them.
    """
    if "scheme" not in keys:
        raise missing(stage, "scheme", f"a preset ({', '.join(PRESETS)}) or a mapping")
    node = keys["scheme"]
    beside = {key: keys[key] for key in ("granularity", "group_size") if key in keys}
    if isinstance(node.content, Scalar):
        values = {name: getattr(_preset(node), name) for name in field_names(QuantScheme)}
        return make(QuantScheme, _merge(values, read_fields(QuantScheme, node, beside)), stage)
    inside = mapping(node)
    check_keys(node, inside, field_names(QuantScheme))
    for key, value in beside.items():
        if key in inside:
            raise problem(value, f"{key!r} is also given inside scheme; give it once")
    values = read_fields(QuantScheme, node, {**inside, **beside})
    # Together, so that a wrong value is found at its own place, be it in here or beside.
    whole = replace(stage, content={**inside, **beside}) if beside else node
    return make(QuantScheme, _merge({}, values), whole)


def change_scheme(
    override: Node, keys: Mapping[str, Node], base: QuantScheme | None
) -> QuantScheme | None:
    """The scheme of an override whose mapping is `keys`: its own, or its stage's with changes.

    `scheme` is whole: a group size or granularity beside the stage's does not go with it.
    """
    if "scheme" in keys:
        for key in ("bits", "symmetric"):
            if key in keys:
                raise problem(keys[key], "goes without scheme, which says it; give one of the two")
        return read_scheme(override, keys)
    given = {key: keys[key] for key in CHANGES if key in keys}
    if not given:
        return base
    if base is None:
        raise problem(
            given[next(iter(given))],
            "changes the stage's scheme, which it does not have; give the override a scheme",
        )
    values = {name: getattr(base, name) for name in field_names(QuantScheme)}
    changed = _merge(values, read_fields(QuantScheme, override, given))
    return make(QuantScheme, changed, override)


def _preset(node: Node) -> QuantScheme:
    assert isinstance(node.content, Scalar)
    if node.is_null or node.content.text not in PRESETS:
        word = node.content.text
        raise problem(
            node,
            f"unknown scheme {node.shown()}; allowed: {', '.join(PRESETS)},"
            f" or a mapping {{bits: 4, group_size: 64}}{nearest(word, PRESETS)}",
        )
    return PRESETS[node.content.text]


def _merge(values: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Values with what was given on top; granularity and group size follow each other."""
    merged = {**values, **given}
    if "granularity" in given and given["granularity"] != "group":
        merged["group_size"] = given.get("group_size", 0)
    elif "granularity" in given and not merged.get("group_size", 1):
        merged["group_size"] = QuantScheme().group_size
    elif "group_size" in given:
        merged["granularity"] = "group"
    return merged
