"""A weight of bf16 in panels of 32 outputs, each one stream, as products in bf16 read it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

PANEL = 32  # outputs


@dataclass(frozen=True, slots=True, eq=False)
class PairPanels:
    """A weight [N, K]. values: bf16 [panels, pairs of columns, 32 outputs, 2]; outputs and a column
    that only fill up are 0."""

    values: Tensor
    shape: tuple[int, int]

    def rows(self, index: Tensor) -> Tensor:
        """index: whole numbers [any] -> bf16 [any, K], those rows of the weight."""
        found = self.values[index // PANEL, :, index % PANEL]
        return found.flatten(1)[:, : self.shape[1]]


def pair_numbers(shape: tuple[int, int]) -> int:
    """Of the panels of a weight [N, K], with those that only fill up."""
    outputs, columns = shape
    return -(-outputs // PANEL) * PANEL * -(-columns // 2) * 2


def lay_out_pairs(weight: Tensor) -> PairPanels:
    """weight: bf16 [N, K]."""
    n, k = weight.shape
    filled = pad(weight, (0, k % 2, 0, -n % PANEL))
    values = filled.reshape(-1, PANEL, (k + 1) // 2, 2).transpose(1, 2).contiguous()
    return PairPanels(values, (n, k))


def weight_of(panels: PairPanels) -> Tensor:
    """The inverse: bf16 [N, K]."""
    n, k = panels.shape
    return panels.values.transpose(1, 2).reshape(-1, (k + 1) // 2 * 2)[:n, :k]


def joined_pairs(parts: Sequence[PairPanels]) -> PairPanels:
    """The outputs of all, one behind the other."""
    if any(part.shape[0] % PANEL for part in parts[:-1]):  # something lies between them
        return lay_out_pairs(torch.cat([weight_of(part) for part in parts]))
    outputs = sum(part.shape[0] for part in parts)
    return PairPanels(torch.cat([part.values for part in parts]), (outputs, parts[0].shape[1]))
