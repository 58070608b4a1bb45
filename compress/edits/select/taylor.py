"""taylor: keeps the groups without which the loss would change most, to first order.

LLM-Pruner: on the structural pruning of large language models. Ma, Fang, Wang 2023,
https://arxiv.org/abs/2305.11627

Without the weights w the loss changes by gradient · w to first order. Of a channel LLM-Pruner looks
at the vectors that go with it, one in each matrix: |Σ gradient · w|. A group's score is the sum
over its channels and over the matrices (the authors' `sum`). Left out: the second order, and the
score of each weight for itself, which are options of the authors.
"""

import torch
from torch import Tensor

from compress.edits.select.evidence import Evidence
from compress.edits.select.groups import Groups


def change_of_loss(weight: Tensor, gradient: Tensor) -> Tensor:
    """What the loss would change by without each row, to first order: fp64 [K].

    weight, gradient: [K, *], a row for each channel.
    """
    return (weight.double() * gradient.double()).sum(dim=1)


def scores(seen: Evidence, groups: Groups) -> Tensor:
    """fp64 [groups]."""
    assert seen.changes, "taylor looks at what the loss would change by"
    return groups.rows(torch.stack(seen.changes).abs().sum(dim=0)).sum(dim=1)


def choose(seen: Evidence, groups: Groups, keep: int) -> Tensor:
    """The groups with the highest scores."""
    return groups.highest(scores(seen, groups), keep)
