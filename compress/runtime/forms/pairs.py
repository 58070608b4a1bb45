"""Dense weights of bf16 in panels, for an engine whose products are in bf16 on a CPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.quant.tensor import InputQuantization
from compress.runtime.forms.form import Arithmetic, LinearWeight
from compress.runtime.forms.input_rounding import rounded
from compress_kernels.ops.pairs import compiled_pairs, pair_linear
from compress_kernels.pairs import PairPanels, joined_pairs


def in_pairs(how: Arithmetic) -> bool:
    """Whether an engine keeps its dense weights so."""
    return how.dtype == torch.bfloat16 and compiled_pairs(how.device)


@dataclass(frozen=True, slots=True, eq=False)
class PairWeight:
    """A weight [N, K]."""

    panels: PairPanels

    @property
    def shape(self) -> tuple[int, int]:
        return self.panels.shape

    @property
    def nbytes(self) -> int:
        return self.panels.values.nbytes

    def rows(self, index: Tensor) -> Tensor:
        """index: whole numbers [any] -> [any, K]."""
        return self.panels.rows(index)

    def matmul(self, x: Tensor, inputs: InputQuantization | None, bias: Tensor | None) -> Tensor:
        x = x if inputs is None else rounded(x, inputs)
        return pair_linear(x, self.panels, bias)

    def joined(self, others: tuple[LinearWeight, ...]) -> "PairWeight | None":
        parts = [other.panels for other in others if isinstance(other, PairWeight)]
        alike = len(parts) == len(others)
        return PairWeight(joined_pairs((self.panels, *parts))) if alike else None
