"""Keys and values of a GGUF file."""

from typing import TypeAlias

# Whole numbers are stored in 32 bits, others as fp32; a tuple has values of one kind.
Value: TypeAlias = str | bool | int | float | tuple[str, ...] | tuple[int, ...] | tuple[float, ...]
Field: TypeAlias = tuple[str, Value]
Fields: TypeAlias = tuple[Field, ...]
