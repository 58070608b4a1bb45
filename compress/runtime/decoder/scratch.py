"""Memory between the ops of a step that is one call."""

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from compress.runtime.decoder.attention import Angles


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """Where a step's choices lie. logits: fp32 [rows, vocabulary]. tokens: int64 [rows], of the
    highest ones. highest: fp32 [rows]."""

    logits: Tensor
    tokens: Tensor
    highest: Tensor

    @classmethod
    def of(cls, rows: int, vocabulary: int) -> "Choices":
        tokens = torch.zeros(rows, dtype=torch.int64)
        return cls(torch.zeros(rows, vocabulary), tokens, torch.zeros(rows))


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """Where numbers of a step lie between ops, fp32, for up to `rows` tokens; layers take turns.

    x: the residual stream, [rows, hidden].
    """

    rows: int
    hidden: int
    _taken: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def of(self, name: str, *sizes: int) -> Tensor:
        """[rows, *sizes]; what was asked for by one name and width is the same memory."""
        width = prod(sizes)
        if (name, width) not in self._taken:
            self._taken[name, width] = torch.zeros(self.rows, width)
        return self._taken[name, width].view(self.rows, *sizes)

    @property
    def x(self) -> Tensor:
        return self.of("x", self.hidden)

    @property
    def final(self) -> Tensor:
        """What is behind the last norm, of the rows that are wanted: [rows, hidden]."""
        return self.of("final", self.hidden)

    def angles(self, rotation: int, pairs: int) -> Angles:
        """Cosine and sine of a step, [rows, pairs] each."""
        return self.of(f"cos {rotation}", pairs), self.of(f"sin {rotation}", pairs)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        return tuple(self._taken.values())
