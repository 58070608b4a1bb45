"""From a tree to dataclasses, driven by their type hints: one reader for every part of a recipe.

A field without a default is required; its annotation says what it takes: bool, int, float, str,
Literal, tuple[X, ...], another dataclass, or a union of these with None; int | float is a whole
number where it has no point. A new method's options need no code here.
"""

import difflib
import math
import re
import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from compress.errors import RecipeError
from compress.recipe.keys import key_of
from compress.recipe.reading.tree import Node, Scalar, is_mapping, problem

T = TypeVar("T")
MOST = 2**63 - 1  # what torch, headers and the system count with
_INT = re.compile(r"[-+]?[0-9](_?[0-9])*")
# Numbers that YAML writers put in quotes when they mean text; odd spellings (1e5, 08) stay text.
_PLAINLY_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]+)?")
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def read(hint: Any, node: Node) -> Any:
    """The node as an instance of the annotation; RecipeError with the place otherwise."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _read_union(get_args(hint), node)
    if origin is Literal:
        return _read_literal(get_args(hint), node)
    if origin is tuple:
        if not isinstance(node.content, tuple):
            raise problem(node, f"is {node.shown()}; it takes a list of {_describe(hint)}")
        return tuple(read(get_args(hint)[0], item) for item in node.content)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return read_dataclass(hint, node)
    return _read_scalar(hint, node)


def read_dataclass(cls: type[T], node: Node) -> T:
    """An instance from a mapping: no unknown key, none missing, values checked by the class."""
    keys = mapping(node)
    check_keys(node, keys, field_names(cls))
    return make(cls, read_fields(cls, node, keys), node)


def read_fields(cls: type, node: Node, keys: Mapping[str, Node]) -> dict[str, Any]:
    """Values of the fields that `keys` gives; the others must have defaults. Null takes a section
    out."""
    hints, optional = _hints(cls), sections(cls)
    values = {}
    for item in _init_fields(cls):
        key = key_of(item)
        if key in keys and not (key in optional and keys[key].is_null):
            values[item.name] = read(hints[item.name], keys[key])
        elif _required(item):
            raise missing(node, key, _describe(hints[item.name]))
    return values


def make(cls: type[T], values: Mapping[str, Any], node: Node) -> T:
    """The instance; what the class itself refuses gets the place of the key it speaks of."""
    try:
        return cls(**values)
    except RecipeError as error:
        # Some classes name their section first, which the key path already does.
        message = str(error).removeprefix(f"{node.path.rpartition('.')[2]}: ")
        raise problem(_spoken_of(node, message), message) from None


def mapping(node: Node) -> Mapping[str, Node]:
    """The keys of a node; RecipeError unless it is a mapping."""
    if not is_mapping(node.content):
        raise problem(node, f"is {node.shown()}; it takes a mapping (key: value)")
    return node.content


def given(node: Node, optional: Collection[str]) -> dict[str, Node]:
    """The keys of a node without the null ones of `optional`: null is leaving a section out."""
    return {k: x for k, x in mapping(node).items() if not (k in optional and x.is_null)}


def sections(cls: type) -> tuple[str, ...]:
    """Fields that a mapping or a list fills, and that may be left out."""
    hints = _hints(cls)
    return tuple(
        key_of(item)
        for item in _init_fields(cls)
        if not _required(item) and _holds_several(hints[item.name])
    )


def check_keys(node: Node, keys: Mapping[str, Node], allowed: Collection[str]) -> None:
    """RecipeError for the first unknown key, with the allowed ones and the nearest spelling."""
    for key, value in keys.items():
        if key not in allowed:
            raise problem(
                value, f"unknown key {key!r}; allowed: {', '.join(allowed)}{nearest(key, allowed)}"
            )


def field_names(cls: type) -> tuple[str, ...]:
    return tuple(key_of(item) for item in _init_fields(cls))


def missing(node: Node, key: str, wanted: str) -> RecipeError:
    """The error for a required key that is not there."""
    return problem(node, f"required key {key!r} is missing; it takes {wanted}")


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for a close spelling, else nothing."""
    found = closest(word, known)
    return "" if found is None else f"; did you mean {found!r}?"


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word of the closest spelling, None where none is close."""
    by_fold = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), by_fold, n=1)
    return by_fold[close[0]] if close else None


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _init_fields(cls: Any) -> tuple[Field[Any], ...]:
    return tuple(item for item in fields(cls) if item.init)


def _required(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _holds_several(hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not types.NoneType]
        return all(map(_holds_several, kinds))
    return get_origin(hint) is tuple or is_dataclass(hint)


def _spoken_of(node: Node, message: str) -> Node:
    """The value that a message like "bits is 9; ..." is about, or the whole node."""
    keys = node.content if is_mapping(node.content) else {}
    for word in re.findall(r"^\w+|\w+(?= is )", message):
        if word in keys:
            return keys[word]
    return node


def _read_union(kinds: tuple[Any, ...], node: Node) -> Any:
    if node.is_null and types.NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
    lists = [kind for kind in kinds if get_origin(kind) is tuple]
    others = [kind for kind in kinds if get_origin(kind) is not tuple]
    wants_list = isinstance(node.content, tuple)
    chosen = lists if lists and (wants_list or not others) else others
    if chosen == [int, float]:  # a count or a share: the point tells
        whole = isinstance(node.content, Scalar) and _INT.fullmatch(node.content.text)
        chosen = [int if whole else float]
    assert len(chosen) == 1, f"ambiguous annotation {kinds}"
    return read(chosen[0], node)


def _read_literal(choices: tuple[Any, ...], node: Node) -> Any:
    text = node.content.text if isinstance(node.content, Scalar) and not node.is_null else None
    for choice in choices:
        if text is not None and text == str(choice):
            return choice
    names = [str(choice) for choice in choices]
    hint = nearest(text, names) if text is not None else ""
    raise problem(node, f"is {node.shown()}; allowed: {', '.join(names)}{hint}")


def _read_scalar(kind: Any, node: Node) -> Any:
    assert kind in _NAMES, f"a recipe field of type {kind} has no reader"
    scalar = node.content
    if not isinstance(scalar, Scalar) or scalar.is_null:
        raise problem(node, f"is {node.shown()}; it takes {_NAMES[kind]}")
    if kind is str:
        return _text(scalar, node)
    value = _number(kind, scalar.text) if scalar.plain else None
    if isinstance(value, int) and abs(value) > MOST:
        raise problem(node, f"is {node.shown()}; {MOST} is the most")
    if value is None:
        raise problem(node, f"is {node.shown()}; it takes {_NAMES[kind]}")
    return value


def _text(scalar: Scalar, node: Node) -> str:
    other = scalar.text in ("true", "false") or _PLAINLY_NUMBER.fullmatch(scalar.text)
    if scalar.plain and other:
        raise problem(node, f"is {scalar.text}; it takes text (put it in quotes if it is meant so)")
    return scalar.text


def _number(kind: type, text: str) -> bool | int | float | None:
    """Text as bool, int or finite float; None when it is none."""
    if kind is bool:
        return {"true": True, "false": False}.get(text)
    if kind is int:
        return int(text) if _INT.fullmatch(text) and len(text) < 40 else None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and text.isascii() else None


def _describe(hint: Any) -> str:
    """What a key takes, in words."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(kind) for kind in get_args(hint) if kind is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(hint))
    if origin is tuple:
        inner = get_args(hint)[0]
        return "mappings" if is_dataclass(inner) else _NAMES.get(inner, "values")
    return _NAMES.get(hint, "a mapping")
