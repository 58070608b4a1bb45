"""Memory between the ops of a step that is one call."""

from ctypes import Array, c_float, c_int64
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from compress.runtime.decoder.attention import Angles


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """Where a step's choices lie. logits: [rows, vocabulary] of the decoder's dtype. tokens: int64
    [rows], of the highest ones. highest: fp32 [rows]. As ctypes' arrays, of which Python reads a
    few numbers sooner than of numpy's or torch's."""

    logits: Tensor
    tokens: "Array[c_int64]"
    highest: "Array[c_float]"

    @classmethod
    def of(cls, rows: int, vocabulary: int, dtype: torch.dtype) -> "Choices":
        logits = torch.zeros(rows, vocabulary, dtype=dtype)
        return cls(logits, (c_int64 * rows)(), (c_float * rows)())


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """Where numbers of a step lie between ops, for up to `rows` tokens; layers take turns.

    dtype: the decoder's. What it has in fp32 whatever that is, angles and shares of experts, is in
    fp32 here, too.

    x: the residual stream, [rows, hidden].
    """

    rows: int
    hidden: int
    dtype: torch.dtype
    _taken: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def of(self, name: str, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """[rows, *sizes]; what was asked for by one name and width is the same memory. dtype: the
        decoder's where left out; one for each name."""
        width = prod(sizes)
        if (name, width) not in self._taken:
            self._taken[name, width] = torch.zeros(self.rows, width, dtype=dtype or self.dtype)
        return self._taken[name, width].view(self.rows, *sizes)

    @property
    def x(self) -> Tensor:
        return self.of("x", self.hidden)

    @property
    def final(self) -> Tensor:
        """What is behind the last norm, of the rows that are wanted: [rows, hidden]."""
        return self.of("final", self.hidden)

    def angles(self, rotation: int, pairs: int) -> Angles:
        """Cosine and sine of a step, fp32 [rows, pairs] each."""
        cos, sin = (
            self.of(f"{name} {rotation}", pairs, dtype=torch.float32) for name in ("cos", "sin")
        )
        return cos, sin

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        return tuple(self._taken.values())
