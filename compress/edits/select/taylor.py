"""taylor: keeps the groups without which the loss would change most, to first order.

LLM-Pruner: on the structural pruning of large language models. Ma, Fang, Wang 2023,
https://arxiv.org/abs/2305.11627

Without the weights w the loss changes by gradient · w to first order. LLM-Pruner looks at it of a
vector, the weights of one matrix that go with one channel, |Σ gradient · w|, or of each weight,
Σ |gradient · w|; vectors are the default here. A group's score is the sum over its channels and
over the matrices (the authors' `sum`).
"""

from typing import Literal

import torch
from torch import Tensor

from compress.edits.select.evidence import Evidence
from compress.edits.select.groups import Groups

Unit = Literal["vector", "weight"]


def scores(seen: Evidence, groups: Groups, *, of: Unit = "vector") -> Tensor:
    """fp64 [groups]."""
    weights = (seen.weight.T, *seen.producers)
    assert len(seen.gradients) == len(weights), "taylor looks at a gradient of every weight"
    gradients = (seen.gradients[0].T, *seen.gradients[1:])
    channels = torch.zeros(seen.weight.shape[1], dtype=torch.float64, device=seen.weight.device)
    for weight, gradient in zip(weights, gradients, strict=True):
        changes = weight.double() * gradient.double()  # [K, *]
        channels += changes.sum(dim=1).abs() if of == "vector" else changes.abs().sum(dim=1)
    return groups.rows(channels).sum(dim=1)


def choose(seen: Evidence, groups: Groups, keep: int) -> Tensor:
    """The groups with the highest scores."""
    return groups.highest(scores(seen, groups), keep)
