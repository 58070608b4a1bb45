"""How a scheme rounds rows that are multiplied with whole codes: each row by itself, to 8 bits."""

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
