"""activation: keeps the channels that are largest on calibration text.

Compact language models via pruning and knowledge distillation (Minitron). Muralidharan et al. 2024,
https://arxiv.org/abs/2407.14679

The score of a channel is an aggregate over the batch of an aggregate over each sequence (section
2.2): mean of |x|, l2 norm or variance each. The paper's best pair (its table of aggregations), and
the default, is the l2 norm over the batch of the mean of |x| over a sequence. A head's score is the
l2 norm of those of its channels, as in NVIDIA's Model-Optimizer.
"""

from torch import Tensor

from compress.edits.select.evidence import Evidence
from compress.edits.select.groups import Groups


def scores(seen: Evidence, groups: Groups) -> Tensor:
    """fp64 [groups], by the two aggregates of what was seen."""
    assert seen.sequences is not None, "activation looks at sequences"
    channels = seen.sequences.aggregate()
    return groups.rows(channels).square().sum(dim=1).sqrt()


def choose(seen: Evidence, groups: Groups, keep: int) -> Tensor:
    """The groups with the highest scores."""
    return groups.highest(scores(seen, groups), keep)
