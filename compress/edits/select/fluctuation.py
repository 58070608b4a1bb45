"""fluctuation: keeps the channels that vary most around their means, as seen in the output.

Fluctuation-based adaptive structured pruning for large language models (FLAP). An et al. 2023,
https://arxiv.org/abs/2312.11983

The score of a channel is var(x) |W_col|² (the authors' WIFV), a head's that of its channels
summed. FLAP adds what the removed channels give on average to a bias; here a repair refits the bias
of a linear that has one. FLAP also shares a cut out among layers, which here all stay equal.
"""

from torch import Tensor

from compress.edits.select.evidence import Evidence
from compress.edits.select.groups import Groups


def scores(seen: Evidence, groups: Groups) -> Tensor:
    """fp64 [groups]."""
    assert seen.moments is not None, "fluctuation looks at moments"
    tokens = max(1, seen.moments.tokens)
    mean = seen.moments.x_sum / tokens
    variance = (seen.moments.gram.diagonal() / tokens - mean.square()).clamp(min=0)
    return groups.rows(variance * seen.weight.double().square().sum(dim=0)).sum(dim=1)


def choose(seen: Evidence, groups: Groups, keep: int) -> Tensor:
    """The groups with the highest scores."""
    return groups.highest(scores(seen, groups), keep)
