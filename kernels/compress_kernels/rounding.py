"""How a scheme rounds rows that are multiplied with codes: each row by itself, to 8 bits."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RowRounding:
    """kind: where the scale of a row comes from.

    "token": its largest magnitude lands on `largest` (127.5 of 8 bits), and codes go from
    -(largest + 0.5) to largest - 0.5. "fixed": `scale` is that of every row. "absmax": the largest
    lands on `largest` (127). "outliers": the same, in fp16 and without numbers that reach
    `threshold` there; those are multiplied as they are. compress.quant.activations has the codes.
    """

    kind: Literal["token", "fixed", "absmax", "outliers"]
    largest: float
    scale: float = 1.0
    threshold: float = 0.0


@dataclass(frozen=True, slots=True)
class FloatRounding:
    """To E4M3 numbers from -448 to 448, for products with such codes.

    group: neighbouring columns that share a scale, whose largest magnitude lands on 448; 0 for a
    whole row. scale: that of all numbers, where it does not come from them.
    """

    group: int = 0
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class CodeRounding:
    """How rows become the nearest codes, times their scale again: each row by itself.

    codes: E4M3 numbers from -448 to 448, or whole ones from -(largest + 0.5) to largest - 0.5, or
    LLM.int8()'s, from -largest to largest. largest: the code that the largest magnitude of a group
    lands on: 448, or 127.5 of 8 bits, or 127. group: neighbouring columns that share a scale; 0 for
    a whole row. scale: that of all numbers, where it does not come from them. threshold: of
    LLM.int8() alone, a number of fp16; what reaches it there stays as it is, beside the others.
    """

    codes: Literal["e4m3", "int", "llm.int8"]
    largest: float
    group: int = 0
    scale: float | None = None
    threshold: float = 0.0
