"""Values of a quantization_config, which comes with the checkpoint: checked before use.

place: where in config.json the value stands, for the CheckpointError that names it.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from compress.errors import CheckpointError, RecipeError
from compress.expressions import Expression, expression

_Noun = TypeVar("_Noun")


def require(place: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(a) for a in allowed)
        raise CheckpointError(f"{place} is {shown(value)}; this version reads {choices}")


def mapping(place: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{place} is {shown(value)}; it must be a mapping")
    return value


def whole(place: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"{place} is {shown(value)}; it must be a whole number")
    return value


def flag(place: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise CheckpointError(f"{place} is {shown(value)}; it must be true or false")
    return value


def names(place: str, value: object) -> tuple[str, ...]:
    """A list of texts; null is an empty one."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise CheckpointError(f"{place} is {shown(value)}; it must be a list of module names")
    return tuple(value)


def names_or_patterns(place: str, value: object) -> tuple[str, ...]:
    """A list of texts, of which those that begin with "re:" are regular expressions."""
    entries = names(place, value)
    for entry in entries:
        if entry.startswith("re:"):
            pattern(place, entry, "re:")
    return entries


def pattern(place: str, text: str, prefix: str = "") -> Expression:
    """A regular expression behind a prefix, as loaders match it against module names.

    CheckpointError for one that is none, and while it is matched for one that takes too long.
    """
    return expression(
        text.removeprefix(prefix), lambda why: CheckpointError(f"{place}: {shown(text)} {why}")
    )


def made(place: str, make: Callable[[], _Noun]) -> _Noun:
    """A noun of ours; CheckpointError for widths or group sizes that it does not have."""
    try:
        return make()
    except RecipeError as error:
        raise CheckpointError(f"{place}: {error}") from None


def shown(value: object) -> str:
    """A value of the config for a message, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
