"""How a recipe names tasks: a file, or a mapping with `path`. A file's stem is the task's name."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from compress.errors import RecipeError
from compress.recipe.reading.reader import (
    check_keys,
    field_names,
    make,
    mapping,
    missing,
    read_fields,
)
from compress.recipe.reading.tree import Node, Origin, Scalar, is_mapping, problem, read_tree
from compress.recipe.task_config import TaskConfig


def task_list(node: Node) -> Node:
    """A list of tasks with every entry in its long form, with name and absolute path; one bare
    entry is a list of one."""
    items = node.content if isinstance(node.content, tuple) else (node,)
    long = [_long_form(item) for item in items]
    stems = [_stem(keys) for keys in long if "name" not in keys]
    named = [
        replace(item, content=_named(item, keys, stems))
        for item, keys in zip(items, long, strict=True)
    ]
    return replace(node, content=tuple(named))


def read_task_options(options: Sequence[str], max_items: int | None) -> tuple[TaskConfig, ...]:
    """Tasks of a command line: files, or YAML mappings. max_items: of those that do not say.

    RecipeError in one line for a mapping that cannot be read.
    """
    nodes = tuple(_option(option, place) for place, option in enumerate(options))
    tasks = task_list(Node(Origin("--task", Path.cwd(), lines=False), 1, "", nodes)).content
    assert isinstance(tasks, tuple)
    configs = (make(TaskConfig, read_fields(TaskConfig, t, mapping(t)), t) for t in tasks)
    found = [c if c.max_items else replace(c, max_items=max_items) for c in configs]
    for name in (config.name for config in found):
        if [config.name for config in found].count(name) > 1:
            raise RecipeError(f"--task: two tasks are named {name!r}; give one another name")
    return tuple(found)


def _option(text: str, place: int) -> Node:
    origin = Origin(f"--task {text}", Path.cwd(), lines=False)
    if text.lstrip().startswith("{"):
        return read_tree(text, origin, "task")
    return Node(origin, 1, "task", Scalar(text, plain=False))


def _long_form(node: Node) -> dict[str, Node]:
    """The keys of a task, its path absolute."""
    if isinstance(node.content, Scalar) and not node.is_null and node.content.text:
        keys = {"path": replace(node, content=Scalar(node.content.text, plain=False))}
    elif is_mapping(node.content):
        keys = dict(node.content)
        check_keys(node, keys, field_names(TaskConfig))
    else:
        raise problem(node, f"is {node.shown()}; it takes a file or a mapping {{path: FILE, ...}}")
    if "path" not in keys:
        raise missing(node, "path", "a .jsonl file")
    keys["path"] = _absolute(keys["path"])
    return keys


def _absolute(node: Node) -> Node:
    if not isinstance(node.content, Scalar) or node.is_null or not node.content.text:
        raise problem(node, f"is {node.shown()}; it takes a .jsonl file")
    path = os.path.join(node.origin.folder, os.path.expanduser(node.content.text))
    return replace(node, content=Scalar(os.path.normpath(path), plain=False))


def _named(node: Node, keys: Mapping[str, Node], stems: Sequence[str]) -> dict[str, Node]:
    """With a name: the file's stem, its folder in front where two files have the same."""
    if "name" in keys:
        return dict(keys)
    name = _stem(keys)
    if stems.count(name) > 1:
        name = f"{PurePath(_path(keys)).parent.name}/{name}"
    return {**keys, "name": replace(node, path=node.child("name"), content=Scalar(name, False))}


def _stem(keys: Mapping[str, Node]) -> str:
    return PurePath(_path(keys)).stem


def _path(keys: Mapping[str, Node]) -> str:
    content = keys["path"].content
    assert isinstance(content, Scalar)
    return content.text
