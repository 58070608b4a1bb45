"""Values of config.json that say how a decoder computes, checked as they are read.

place: what the key is called in a message, "rope_parameters.factor"; the key itself when empty.
"""

from collections.abc import Mapping
from typing import Any

from compress.errors import CheckpointError


def refuse(place: str, value: object, remedy: str) -> CheckpointError:
    """One line with the key, its value and what would be right."""
    return CheckpointError(f"config.json: {place} is {value!r}; {remedy}")


def number(text: Mapping[str, Any], key: str, default: float | None, place: str = "") -> float:
    """A number above 0. A key that is absent or null stands for `default`, where there is one."""
    value = text.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise refuse(place or key, value, "it must be a number above 0")
    return float(value)


def optional(text: Mapping[str, Any], key: str, default: float | None) -> float | None:
    """A number above 0, or None for null. A key that is absent stands for `default`."""
    given = text.get(key, default)
    return None if given is None else number({key: given}, key, None)


def whole(text: Mapping[str, Any], key: str, default: int | None, place: str = "") -> int:
    """A whole number from 1 on. A key that is absent or null stands for `default`."""
    value = text.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refuse(place or key, value, "it must be a whole number, 1 or more")
    return value


def flag(text: Mapping[str, Any], key: str, default: bool) -> bool:
    """true or false. A key that is absent or null stands for `default`."""
    value = text.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise refuse(key, value, "it must be true or false")
    return value
