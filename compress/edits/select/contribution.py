"""contribution: keeps the channels that give most to the output of the linear that reads them.

The score of a group B is the norm of its part of the output over all tokens,
√(Σ |W_B x_B|²) = √tr(W_B G_BB W_Bᵀ). For one channel it is rms(x) |W_col| √tokens, the criterion of
Wanda (Sun et al. 2023, https://arxiv.org/abs/2306.11695) summed over a column.
"""

import torch
from torch import Tensor

from compress.edits.select.evidence import Evidence
from compress.edits.select.groups import Groups


def scores(seen: Evidence, groups: Groups) -> Tensor:
    """fp64 [groups]."""
    assert seen.moments is not None, "contribution looks at moments"
    grams = groups.blocks(seen.moments.gram).double()  # [groups, width, width]
    weights = seen.weight.double().reshape(seen.weight.shape[0], -1, groups.width).transpose(0, 1)
    return torch.einsum("gni,gij,gnj->g", weights, grams, weights).clamp(min=0).sqrt()


def choose(seen: Evidence, groups: Groups, keep: int) -> Tensor:
    """The groups with the highest scores."""
    return groups.highest(scores(seen, groups), keep)
