"""A weight of each head, where products of few columns or outputs read them."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

PANEL = 16  # outputs are filled up to a multiple of it


@dataclass(frozen=True, slots=True, eq=False)
class HeadPanels:
    """Weights [heads, N, K]. values: [heads, K, N filled up], of fp32 or a dtype of 16 bits;
    outputs that only fill up are 0. outputs: N."""

    values: Tensor
    outputs: int

    @property
    def shape(self) -> tuple[int, int, int]:
        heads, columns, _ = self.values.shape
        return heads, self.outputs, columns

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


def lay_out_heads(weights: Tensor) -> HeadPanels:
    """weights: [heads, N, K]; they may lie apart."""
    filled = pad(weights.transpose(1, 2), (0, -weights.shape[1] % PANEL))
    return HeadPanels(filled.clone(memory_format=torch.contiguous_format), weights.shape[1])
