"""`--set key=value`: values of a recipe replaced from the command line."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from compress.errors import RecipeError
from compress.recipe.reading.tree import Node, Origin, Scalar, is_mapping, problem, read_tree

_KEY_PATH = re.compile(r"[\w-]+(?:\.[\w-]+|\[\d+\])*")
_STEP = re.compile(r"[\w-]+")


def apply_overrides(root: Node, overrides: Iterable[str], folder: Path) -> Node:
    """The tree with each "key=value" in place, in order.

    Keys are dotted paths with list positions, `stages[0].group_size` or `stages.0.group_size`;
    values are YAML; relative paths in them start at `folder`. RecipeError names the override.
    """
    for override in overrides:
        root = _apply(root, override, folder)
    return root


def _apply(root: Node, override: str, folder: Path) -> Node:
    label = f"--set {override}"
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not _KEY_PATH.fullmatch(key):
        raise RecipeError(f"{label}: not KEY=VALUE; for example stages[0].group_size=64")
    origin = Origin(label, folder, lines=False)
    steps = _STEP.findall(key)
    return _replace(root, steps, read_tree(text, origin, _path(steps)), origin)


def _path(steps: list[str]) -> str:
    """The canonical spelling of a key path: positions in brackets."""
    parts = [f"[{step}]" if step.isdecimal() else f".{step}" for step in steps]
    return "".join(parts).removeprefix(".")


def _replace(node: Node, steps: list[str], value: Node, origin: Origin) -> Node:
    if not steps:
        return value
    step, rest = steps[0], steps[1:]
    here = Node(origin, 1, node.path, node.content)
    if isinstance(node.content, tuple):
        items = list(node.content)
        if not step.isdecimal() or int(step) >= len(items):
            raise problem(
                here, f"{step!r} is no position in this list; positions are {_positions(items)}"
            )
        items[int(step)] = _replace(items[int(step)], rest, value, origin)
        return replace(node, content=tuple(items))
    if not is_mapping(node.content) and not node.is_null:
        raise problem(here, f"is the value {node.shown()}; it has no key {step!r}")
    if step.isdecimal():
        raise problem(here, f"is no list; it has no position {step}")
    keys = dict(node.content) if is_mapping(node.content) else {}
    child = keys.get(step) or Node(origin, 1, node.child(step), Scalar(""))
    keys[step] = _replace(child, rest, value, origin)
    return replace(node, content=keys)


def _positions(items: list[Node]) -> str:
    return "none, it is empty" if not items else f"0 to {len(items) - 1}"
