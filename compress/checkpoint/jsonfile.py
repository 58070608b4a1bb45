"""JSON files of a checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.checkpoint.reading import content_of
from compress.errors import CheckpointError


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError with line and column when it is not one."""
    return parse_object(content_of(path), path)


def parse_object(content: bytes, path: Path) -> dict[str, Any]:
    """The JSON object that a file holds; `path` is for messages."""
    try:
        value = json.loads(content.decode("utf-8"))
        if b"\\ud" in content.lower():  # an escape that may be half a character
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path}:{error.lineno}:{error.colno} is not valid JSON: {error.msg}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object {{...}}")
    return value


def as_json(content: Mapping[str, Any]) -> bytes:
    """A small file of the result."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
