"""A YAML text as a tree in which every value knows its place.

Scalars stay text: the reader converts them to the type that the schema wants, so YAML's guesses
(`no` is false, 1:30 is ninety, 1e-3 is text) never reach a recipe. Anchors, aliases, tags and
several documents are refused: a recipe needs none, and they are how YAML files go wrong.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import yaml
from yaml.events import (
    AliasEvent,
    DocumentEndEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from compress.errors import RecipeError

MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 16
_NULL = frozenset({"", "~", "null", "Null", "NULL"})


@dataclass(frozen=True, slots=True)
class Origin:
    """What a tree was read from: a label for messages, and where relative paths start.

    lines: whether messages give the line (a file) or not (an override on the command line).
    """

    label: str
    folder: Path
    lines: bool = True


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value as written; `plain` when it was not in quotes."""

    text: str
    plain: bool = True

    @property
    def is_null(self) -> bool:
        return self.plain and self.text in _NULL


@dataclass(frozen=True, slots=True)
class Node:
    """A value with its place. path: "stages[0].bits", "" at the top; line counts from 1."""

    origin: Origin
    line: int
    path: str
    content: "Scalar | tuple[Node, ...] | Mapping[str, Node]"

    @property
    def place(self) -> str:
        """ "file.yaml:12" or "--set a=b"."""
        return f"{self.origin.label}:{self.line}" if self.origin.lines else self.origin.label

    @property
    def is_null(self) -> bool:
        return isinstance(self.content, Scalar) and self.content.is_null

    def child(self, key: str) -> str:
        """Key path of a key of this mapping."""
        return f"{self.path}.{key}" if self.path else key

    def shown(self) -> str:
        """The value for a message, cut short."""
        if isinstance(self.content, Scalar):
            if self.content.is_null:
                return "empty"
            text = self.content.text
            return repr(text if len(text) <= 60 else text[:57] + "...")
        return "a mapping" if is_mapping(self.content) else "a list"


def is_mapping(content: object) -> TypeGuard[Mapping[str, Node]]:
    return isinstance(content, Mapping)


def problem(node: Node, message: str) -> RecipeError:
    """A RecipeError in one line: place, key path, message."""
    where = f"{node.place}: {node.path}: " if node.path else f"{node.place}: "
    # A key in quotes may hold line breaks, which the path repeats.
    return RecipeError(" ".join((where + message).splitlines()))


def walk(node: Node) -> Iterator[Node]:
    """The node and everything below it."""
    yield node
    children: tuple[Node, ...] = ()
    if is_mapping(node.content):
        children = tuple(node.content.values())
    elif isinstance(node.content, tuple):
        children = node.content
    for child in children:
        yield from walk(child)


def read_tree(text: str, origin: Origin, path: str = "") -> Node:
    """Tree of a YAML text; RecipeError with the line for anything that is not plain YAML."""
    if len(text) > MAX_CHARACTERS:
        raise RecipeError(
            f"{origin.label}: {len(text)} characters long; a recipe has at most {MAX_CHARACTERS}"
        )
    try:
        return _document(yaml.parse(text, Loader=yaml.SafeLoader), origin, path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = _place(origin, mark.line + 1 if mark else 1)
        raise RecipeError(f"{place}: not valid YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(
            f"{_place(origin, line)}: not valid YAML: character U+{ord(text[error.position]):04X}"
            " is not allowed"
        ) from None


def _line(event: Event) -> int:
    assert event.start_mark is not None
    return event.start_mark.line + 1


def _place(origin: Origin, line: int) -> str:
    return Node(origin, line, "", Scalar("")).place


def _document(events: Iterator[Event], origin: Origin, path: str) -> Node:
    next(events)  # start of the stream
    first = next(events)
    if isinstance(first, yaml.StreamEndEvent):
        return Node(origin, 1, path, Scalar(""))
    root = _value(events, next(events), origin, path, 0, None)
    assert isinstance(next(events), DocumentEndEvent)
    more = next(events)
    if not isinstance(more, yaml.StreamEndEvent):
        place = _place(origin, _line(more))
        raise RecipeError(f"{place}: a second YAML document; a recipe is one document")
    return root


def _value(
    events: Iterator[Event],
    event: Event,
    origin: Origin,
    path: str,
    depth: int,
    line: int | None,
) -> Node:
    """The value that starts with `event`; `line` is that of its key, where it has one."""
    here = Node(origin, line or _line(event), path, Scalar(""))
    if depth > MAX_DEPTH:
        raise problem(here, f"nested more than {MAX_DEPTH} deep")
    _refuse_references(here, event)
    if isinstance(event, ScalarEvent):
        return Node(origin, here.line, path, Scalar(_text(here, event.value), event.style is None))
    if isinstance(event, SequenceStartEvent):
        items: list[Node] = []
        while not isinstance(item := next(events), SequenceEndEvent):
            items.append(_value(events, item, origin, f"{path}[{len(items)}]", depth + 1, None))
        return Node(origin, here.line, path, tuple(items))
    assert isinstance(event, MappingStartEvent)
    return Node(origin, here.line, path, _mapping(events, here, depth))


def _text(here: Node, text: str) -> str:
    """RecipeError for halves of characters, which YAML can write and no file can hold."""
    half = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
    if half is not None:
        raise problem(
            here,
            f"\\u{ord(half):04x} is half a character; write \\U0001F600 or the character itself",
        )
    return text


def _refuse_references(here: Node, event: Event) -> None:
    anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
    if anchor is not None:
        sign = "*" if isinstance(event, AliasEvent) else "&"
        raise problem(
            here, f"{sign}{anchor}: recipes take no anchors or aliases; write the value out"
        )
    if tag is not None:
        raise problem(here, f"{tag}: recipes take no YAML tags; leave it out")


def _mapping(events: Iterator[Event], here: Node, depth: int) -> dict[str, Node]:
    found: dict[str, Node] = {}
    while not isinstance(event := next(events), MappingEndEvent):
        line = _line(event)
        spot = Node(here.origin, line, here.path, Scalar(""))
        _refuse_references(spot, event)
        if not isinstance(event, ScalarEvent):
            raise problem(spot, "a key is a list or a mapping; keys are words")
        key = _text(spot, event.value)
        if key in found:
            where = Node(here.origin, line, here.child(key), Scalar(""))
            raise problem(where, f"duplicate key {key!r}; first given on line {found[key].line}")
        found[key] = _value(events, next(events), here.origin, here.child(key), depth + 1, line)
    return found
