"""What a recipe calls the fields of options."""

from dataclasses import Field
from typing import Any


def key_of(item: Field[Any]) -> str:
    """The field's name; without the line that keeps it apart from a word of Python (`global_`)."""
    return item.name.removesuffix("_")
