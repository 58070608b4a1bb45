"""magnitude: keeps the groups with the largest weights; looks at no text.

DepGraph: towards any structural pruning. Fang et al. 2023, https://arxiv.org/abs/2301.12900

All weights that go with a channel count as one: the column of the linear that reads it, and the
rows that make it. The score of a group is their l2 norm.
"""

from torch import Tensor

from compress.edits.select.evidence import Evidence
from compress.edits.select.groups import Groups


def scores(seen: Evidence, groups: Groups) -> Tensor:
    """fp64 [groups]."""
    channels = seen.weight.double().square().sum(dim=0)
    for producer in seen.producers:
        channels = channels + producer.double().square().sum(dim=1)
    return groups.rows(channels).sum(dim=1).sqrt()


def choose(seen: Evidence, groups: Groups, keep: int) -> Tensor:
    """The groups with the highest scores."""
    return groups.highest(scores(seen, groups), keep)
