"""Report <-> JSON text: strict both ways, byte-deterministic, standard JSON only.

A number that JSON cannot hold (a diverged model has perplexity inf) is written as the string
"inf", "-inf" or "nan" and read back as the number where the schema has one.
"""

import json
import math
import os
import re
import types
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from compress.errors import OutputError
from compress.report.schema import SCHEMA_VERSION, Report

Writer = Callable[[Path, bytes], None]

_SURROGATE = re.compile("[\ud800-\udfff]")
_NON_FINITE = {"inf", "-inf", "nan"}


def to_json(report: Report) -> str:
    """The report as indented JSON, fields in the schema's order, keys of free dicts sorted."""
    return record_json(report)


def record_json(record: Any) -> str:
    """The same of any record of plain data."""
    text = json.dumps(_encode(record), indent=1, ensure_ascii=False, allow_nan=False)
    # A path that is not UTF-8 holds lone surrogates, which only an escape can carry.
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


def from_json(text: str, where: str = "report.json") -> Report:
    """Parse `to_json`'s text; `where` names it in errors.

    Raises OutputError, in one line, for broken JSON, another schema version, an unknown or missing
    key, or a value of the wrong type.
    """
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise OutputError(f"{where}: not valid JSON ({error}); write the report anew") from None
    if not isinstance(data, dict):
        raise OutputError(f"{where}: holds {_kind(data)}, not an object; is it a report.json?")
    version = data.get("schema")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise OutputError(
            f"{where}: schema is {version!r}, this version reads {SCHEMA_VERSION};"
            " read it with the compress-model that wrote it"
        )
    report = _decode(Report, data, where, "")
    assert isinstance(report, Report)
    return report


def write_json(report: Report, path: str | Path, write: Writer | None = None) -> None:
    """Write the report; the file appears whole or not at all. write: what puts bytes in a file."""
    (write or write_whole)(Path(path), to_json(report).encode("utf-8"))


def read_json(path: str | Path) -> Report:
    """Read a report.json. Raises OutputError when it is missing or not a report."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise OutputError(f"{path}: cannot read the report: {reason}") from None
    return from_json(text, str(path))


def write_whole(path: Path, data: bytes) -> None:
    """Write a file by way of a temporary neighbour and one rename."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        raise OutputError(f"{path}: cannot write the report: {error.strerror}") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _encode(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _encode(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, dict):
        return {str(key): _encode(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"a report holds plain JSON values, not {type(value).__name__}: {value!r}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode(kind: Any, value: Any, where: str, path: str) -> Any:
    """`value` as an instance of the annotation `kind`; `path` is the key path so far."""
    if kind is Any:
        return value
    origin = get_origin(kind)
    if origin in (types.UnionType, Union):
        (inner,) = (arg for arg in get_args(kind) if arg is not types.NoneType)
        return None if value is None else _decode(inner, value, where, path)
    if origin is tuple:
        _check(isinstance(value, list), value, "a list", where, path)
        inner = get_args(kind)[0]
        return tuple(_decode(inner, v, where, f"{path}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        _check(isinstance(value, dict), value, "an object", where, path)
        inner = get_args(kind)[1]
        return {k: _decode(inner, v, where, _join(path, k)) for k, v in value.items()}
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return _decode_record(kind, value, where, path)
    return _decode_scalar(kind, value, where, path)


def _decode_record(kind: type, value: Any, where: str, path: str) -> Any:
    _check(isinstance(value, dict), value, "an object", where, path)
    hints = _hints(kind)
    for key in value:
        if key not in hints:
            known = ", ".join(hints)
            raise OutputError(f"{where}: unknown key {_join(path, key)!r}; allowed here: {known}")
    # A key with a default is one that an earlier version did not have.
    needed = {item.name for item in fields(kind) if _is_needed(item)}
    for key in hints:
        if key in needed and key not in value:
            raise OutputError(f"{where}: key {_join(path, key)!r} is missing; write it anew")
    found = {key: hint for key, hint in hints.items() if key in value}
    return kind(**{k: _decode(hint, value[k], where, _join(path, k)) for k, hint in found.items()})


def _is_needed(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _decode_scalar(kind: Any, value: Any, where: str, path: str) -> Any:
    if kind is float:
        if isinstance(value, str) and value in _NON_FINITE:
            return float(value)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        _check(number, value, "a number", where, path)
        return value
    if kind is int:
        whole = isinstance(value, int) and not isinstance(value, bool)
        _check(whole, value, "a whole number", where, path)
        return value
    if kind is bool:
        _check(isinstance(value, bool), value, "true or false", where, path)
        return value
    assert kind is str, f"the schema has a field of type {kind}, which the codec does not know"
    _check(isinstance(value, str), value, "a string", where, path)
    return value


def _check(right: bool, value: Any, wanted: str, where: str, path: str) -> None:
    if not right:
        shown = json.dumps(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise OutputError(f"{where}: {path} is {shown} ({_kind(value)}); it must be {wanted}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
