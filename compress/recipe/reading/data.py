"""How a recipe names texts: short forms of sources and evaluation texts, and their paths.

`{text: FILE}` stands for `{kind: text, path: FILE}`, `self` for `{kind: self}`, `{hub: ID}` for
`{kind: hub, id: ID}`. A relative path starts at the folder of the file (or, in an override, the
current folder) that it was written in.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import get_args, get_type_hints

from compress.recipe.evaluation_config import EvaluationConfig, TextConfig
from compress.recipe.reading.reader import (
    check_keys,
    field_names,
    given,
    make,
    mapping,
    missing,
    read_fields,
    sections,
)
from compress.recipe.reading.tasks import task_list
from compress.recipe.reading.tree import Node, Scalar, is_mapping, problem
from compress_calibration.config import CalibrationConfig, SourceConfig

SOURCE_KINDS: tuple[str, ...] = get_args(get_type_hints(SourceConfig)["kind"])
TEXT_KINDS: tuple[str, ...] = get_args(get_type_hints(TextConfig)["kind"])


def read_calibration(node: Node | None, seed: int) -> CalibrationConfig | None:
    """The calibration section; its seed is the recipe's unless it has one of its own."""
    if node is None:
        return None
    keys = dict(mapping(node))
    _refuse_dataset(keys, "sources")
    check_keys(node, keys, field_names(CalibrationConfig))
    if "sources" not in keys:
        raise missing(node, "sources", "'self' or a list of texts")
    keys["sources"] = source_list(keys["sources"])
    values = {"seed": seed, **read_fields(CalibrationConfig, node, keys)}
    return make(CalibrationConfig, values, node)


def read_evaluation(node: Node | None, seed: int) -> EvaluationConfig | None:
    """The evaluation section; self-generated text is drawn with another seed than calibration."""
    if node is None:
        return None
    keys = given(node, sections(EvaluationConfig))
    _refuse_dataset(keys, "texts")
    check_keys(node, keys, field_names(EvaluationConfig))
    if "texts" in keys:
        texts = _long_list(keys["texts"], TEXT_KINDS, field_names(TextConfig))
        assert isinstance(texts.content, tuple)
        stems = [_stem(keys) for keys in map(mapping, texts.content) if "name" not in keys]
        completed = tuple(_complete_text(text, seed, stems) for text in texts.content)
        keys["texts"] = replace(texts, content=completed)
    if "tasks" in keys:
        keys["tasks"] = task_list(keys["tasks"])
    return make(EvaluationConfig, read_fields(EvaluationConfig, node, keys), node)


def _refuse_dataset(keys: Mapping[str, Node], place: str) -> None:
    """Other tools' key for a data set of the hub, with what says it here."""
    for key in ("dataset", "datasets", "dataset_id"):
        if key in keys:
            value = keys[key]
            name = _word(value) or "ID"
            raise problem(
                value,
                f"unknown key {key!r}; {place}: [{{hub: {name}}}] names a data set of the hub,"
                f" {place}: [{{text: FILE}}] a file",
            )


def source_list(node: Node) -> Node:
    """Sources of tokens with every entry in its long form."""
    return _long_list(node, SOURCE_KINDS, field_names(SourceConfig))


def _long_list(node: Node, kinds: tuple[str, ...], fields: tuple[str, ...]) -> Node:
    """A list of texts with every entry in its long form; one bare entry is a list of one."""
    if isinstance(node.content, tuple):
        items = tuple(_long_form(item, kinds, fields) for item in node.content)
        return replace(node, content=items)
    return replace(node, content=(_long_form(node, kinds, fields),))


def _long_form(node: Node, kinds: tuple[str, ...], fields: tuple[str, ...]) -> Node:
    if isinstance(node.content, Scalar) and node.content.text == "self":
        return replace(node, content={"kind": node})
    if not is_mapping(node.content):
        raise problem(
            node, f"is {node.shown()}; it takes 'self' or a mapping such as {{text: FILE}}"
        )
    keys = dict(node.content)
    check_keys(node, keys, (*kinds, *fields))
    named = [kind for kind in kinds if kind in keys]
    if len(named) + ("kind" in keys) > 1:
        both = ", ".join([*named, *(["kind"] if "kind" in keys else [])])
        raise problem(node, f"names several kinds of text ({both}); give each an entry of its own")
    if named:
        keys = _spell_out(node, keys, named[0])
    elif "kind" not in keys and "path" not in keys:
        raise problem(node, f"names no text; it needs one of {', '.join(kinds)}")
    elif "kind" not in keys:
        keys["kind"] = Node(node.origin, node.line, node.child("kind"), Scalar("text"))
    if "path" in keys:
        keys["path"] = _absolute(keys["path"])
    return replace(node, content=keys)


def _spell_out(node: Node, keys: dict[str, Node], kind: str) -> dict[str, Node]:
    """{text: FILE, ...} as {kind: text, path: FILE, ...}."""
    value = keys.pop(kind)
    target = {"self": None, "hub": "id"}.get(kind, "path")
    if target is None:
        if not (isinstance(value.content, Scalar) and value.content.text == "true"):
            raise problem(value, f"is {value.shown()}; it takes true")
    elif target in keys:
        raise problem(keys[target], f"{target!r} is already given by {kind!r}; give it once")
    else:
        keys[target] = value
    return {"kind": replace(value, content=Scalar(kind)), **keys}


def _absolute(node: Node) -> Node:
    """Paths of the node, one or several, made absolute; other values are left to the reader."""
    if isinstance(node.content, tuple):
        return replace(node, content=tuple(_absolute(item) for item in node.content))
    if not isinstance(node.content, Scalar) or node.is_null or not node.content.text:
        return node
    path = os.path.join(node.origin.folder, os.path.expanduser(node.content.text))
    return replace(node, content=Scalar(os.path.normpath(path), plain=False))


def _complete_text(node: Node, seed: int, stems: Sequence[str]) -> Node:
    """A name from the file or id, and a seed for self-generated text, where they were left out.

    stems: of the files of all texts without a name.
    """
    keys = dict(mapping(node))
    if "name" not in keys:
        name = _default_name(keys, stems)
        if name is None:
            raise missing(node, "name", "a word for the quality table")
        keys["name"] = Node(node.origin, node.line, node.child("name"), Scalar(name, plain=False))
    if _word(keys.get("kind")) == "self" and "seed" not in keys:
        held_out = Scalar(str(seed + 1))
        keys["seed"] = Node(node.origin, node.line, node.child("seed"), held_out)
    return replace(node, content=keys)


def _default_name(keys: Mapping[str, Node], stems: Sequence[str]) -> str | None:
    """The id, or the file's stem with its folder in front where two files have the same."""
    if _word(keys.get("kind")) == "self":
        return "self"
    stem = _stem(keys)
    if stem and stems.count(stem) > 1:
        stem = f"{PurePath(_word(keys.get('path'))).parent.name}/{stem}"
    return _word(keys.get("id")) or stem or None


def _stem(keys: Mapping[str, Node]) -> str:
    return PurePath(_word(keys.get("path"))).stem


def _word(node: Node | None) -> str:
    return node.content.text if node is not None and isinstance(node.content, Scalar) else ""
