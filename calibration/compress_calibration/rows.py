"""One row of jsonl, parquet or a data set to one document."""

from collections.abc import Iterable, Mapping
from typing import Any

from compress.errors import DataError
from compress.text.tokenizer import Tokenizer

# Looked for in this order when a source names no field.
USUAL_FIELDS = ("text", "messages")


def pick_field(names: Iterable[str], field: str, where: str) -> str:
    """The field to read: the one asked for, or the first usual one.

    Raises DataError, listing the fields there are, when it is missing.
    """
    known = list(names)
    wanted = (field,) if field else USUAL_FIELDS
    for name in wanted:
        if name in known:
            return name
    has = ", ".join(known) or "none"
    if field:
        raise DataError(f"{where} has no field {field!r}; its fields: {has}")
    raise DataError(
        f"{where} has neither 'text' nor 'messages'; name one with field: (it has {has})"
    )


def row_text(row: Mapping[str, Any], field: str, where: str, tokenizer: Tokenizer) -> str:
    """The document in a row: its text, or its messages rendered with the chat template.

    Raises DataError, naming the place, when the field is missing or holds something else.
    """
    name = pick_field(row, field, where)
    value = row[name]
    if isinstance(value, str):
        return _encodable(value, name, where)
    if not isinstance(value, list):
        raise DataError(
            f"{where}: field {name!r} holds {_kind(value)};"
            " it must be text (a string) or messages (a list)"
        )
    try:
        return _encodable(tokenizer.apply_chat_template(value), name, where)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _encodable(text: str, name: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: field {name!r} holds half a surrogate pair at character {error.start};"
            " write the text as valid Unicode"
        ) from error
    return text


def _kind(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
