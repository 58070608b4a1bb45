"""Items of a task file: what is asked, and what would be right. One JSON object a line."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from compress.checkpoint.regular import read_lines, usable
from compress.errors import DataError, RecipeError
from compress.recipe.task_config import KINDS, PROMPTS, Kind, TaskConfig

Row = Mapping[str, Any]
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One question. where: "file.jsonl:12".

    pairs: (context, continuation) of each option, to be scored; of a generation its prompt and "".
    sizes: characters of each option, as acc_norm divides by them.
    gold: the index of the right one; 0 where there is but one.
    answers: right texts of a generation.
    """

    where: str
    pairs: tuple[tuple[str, str], ...]
    sizes: tuple[int, ...]
    gold: int = 0
    answers: tuple[str, ...] = ()


FIELDS: Mapping[Kind, tuple[str, ...]] = MappingProxyType(
    {
        "multiple_choice": ("query", "choices", "gold"),
        "partial": ("context_options", "continuation", "gold"),
        "continuation": ("context", "continuation"),
        "generation": ("context", "answer"),
    }
)


def read_items(config: TaskConfig) -> tuple[Kind, tuple[TaskItem, ...]]:
    """The kind of a task and its items, at least one.

    Raises DataError, with file and line, for what cannot be read, RecipeError for keys of the
    config that the kind does not use, and for a prompt that asks every item the same.
    """
    rows = list(islice(_rows(_path(config)), config.max_items))
    if not rows:
        raise DataError(f"{config.path} holds no item; a line is a JSON object")
    kind = _kind_of(*rows[0]) if config.kind == "auto" else config.kind
    config.check_kind(kind)
    _check_prompt(config, kind)
    for where, row in rows:
        _require(where, row, kind)
    return kind, tuple(_READERS[kind](where, row, config) for where, row in rows)


def _check_prompt(config: TaskConfig, kind: Kind) -> None:
    """RecipeError where items, or the options of `partial`, would all have one prompt."""
    own = _FIELD.findall(PROMPTS[kind])[0]
    if config.prompt is None or own in (named := _FIELD.findall(config.prompt)):
        return
    if not named or kind == "partial":
        raise RecipeError(
            f"{config.label}: prompt is {config.prompt!r:.60}, the same for all that is asked;"
            f" write {{{own}}} in it"
        )


def _path(config: TaskConfig) -> Path:
    return usable(os.path.expanduser(config.path), f"{config.label}: path", DataError)


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    """(place, object) of each line that is not empty."""
    try:
        for number, line in enumerate(read_lines(path), start=1):
            if line.strip():
                yield f"{path}:{number}", _object(line, f"{path}:{number}")
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file (looked from {Path.cwd()})") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _object(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where} holds a {type(row).__name__}; a line must be a JSON object")
    return row


def _kind_of(where: str, row: Row) -> Kind:
    for kind in KINDS:
        if all(field in row for field in FIELDS[kind]):
            return kind
    if {"canonical_solution", "test"} <= set(row):
        raise DataError(
            f"{where} asks for a program, which is scored by running it; nothing that a model wrote"
            " is run here, so leave this file out"
        )
    known = "; ".join(", ".join(fields) for fields in FIELDS.values())
    mine = ", ".join(name if name.isprintable() else ascii(name) for name in row) or "none"
    raise DataError(f"{where} has the fields {mine}; a task has {known}")


def _require(where: str, row: Row, kind: Kind) -> None:
    lacking = [field for field in FIELDS[kind] if field not in row]
    if lacking:
        needed = ", ".join(FIELDS[kind])
        raise DataError(f"{where} has no field {lacking[0]!r}; {kind} needs {needed}")


def _choices(where: str, row: Row, config: TaskConfig) -> TaskItem:
    choices = _texts(where, row, "choices")
    context = _filled(where, row, config, "multiple_choice", _text(where, row, "query"))
    return TaskItem(
        where,
        tuple((context, _behind(context, choice, config)) for choice in choices),
        tuple(map(len, choices)),
        _gold(where, row, len(choices)),
    )


def _contexts(where: str, row: Row, config: TaskConfig) -> TaskItem:
    contexts = [
        _filled(where, row, config, "partial", option)
        for option in _texts(where, row, "context_options")
    ]
    end = _text(where, row, "continuation")
    pairs = tuple((context, _behind(context, end, config)) for context in contexts)
    return TaskItem(where, pairs, (len(end),) * len(pairs), _gold(where, row, len(pairs)))


def _continuation(where: str, row: Row, config: TaskConfig) -> TaskItem:
    end = _text(where, row, "continuation")
    context = _filled(where, row, config, "continuation", _text(where, row, "context", empty=True))
    return TaskItem(where, ((context, _behind(context, end, config)),), (len(end),))


def _generation(where: str, row: Row, config: TaskConfig) -> TaskItem:
    context = _filled(where, row, config, "generation", _text(where, row, "context"))
    answer = row["answer"]
    answers = answer if isinstance(answer, list) else [answer]
    if not answers or not all(map(_is_answer, answers)):
        raise DataError(f"{where}: answer is {answer!r:.60}; it is a text, a number, or a list")
    return TaskItem(where, ((context, ""),), (), answers=tuple(map(str, answers)))


def _is_answer(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


_READERS: Mapping[Kind, Callable[[str, Row, TaskConfig], TaskItem]] = MappingProxyType(
    {
        "multiple_choice": _choices,
        "partial": _contexts,
        "continuation": _continuation,
        "generation": _generation,
    }
)


def _filled(where: str, row: Row, config: TaskConfig, kind: Kind, own: str) -> str:
    """The prompt with the line's fields in place. own: what the kind's own field holds."""
    own_field = _FIELD.findall(PROMPTS[kind])[0]

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name == own_field:
            return own
        if not isinstance(row.get(name), str | int | float):
            has = ", ".join(row)
            raise DataError(
                f"{where}: the prompt names {{{name}}}, no text of a line; it has {has}"
            )
        return str(row[name])

    return _FIELD.sub(value, PROMPTS[kind] if config.prompt is None else config.prompt)


def _behind(context: str, continuation: str, config: TaskConfig) -> str:
    """The continuation with what parts it from the context in front."""
    if config.delimiter is not None:
        return config.delimiter + continuation
    parted = not context or context[-1].isspace() or continuation[:1].isspace()
    return continuation if parted else f" {continuation}"


def _text(where: str, row: Row, field: str, *, empty: bool = False) -> str:
    value = row[field]
    if not isinstance(value, str) or not (value or empty):
        raise DataError(f"{where}: {field} is {value!r:.60}; it must be a text")
    return value


def _texts(where: str, row: Row, field: str) -> tuple[str, ...]:
    values = row[field]
    good = isinstance(values, list) and len(values) > 1
    if not good or not all(isinstance(value, str) and value for value in values):
        raise DataError(
            f"{where}: {field} is {values!r:.60}; it must be a list of two texts or more"
        )
    return tuple(values)


def _gold(where: str, row: Row, options: int) -> int:
    gold = row["gold"]
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < options:
        raise DataError(f"{where}: gold is {gold!r:.60}; it is an index from 0 to {options - 1}")
    return gold
