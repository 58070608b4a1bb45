"""How far the result's next-token distribution is from the source's."""

import torch
from torch import Tensor


def kl(source: Tensor, result: Tensor) -> Tensor:
    """KL(source || result) in nats: fp64 [rows].

    source, result: log-probabilities [rows, vocab], fp32. The terms have both signs and nearly
    cancel when the two are close, so they are summed in fp64. A source probability of zero
    contributes nothing, whatever the result says.
    """
    terms = source.exp()
    terms *= torch.where(terms > 0, source - result, 0.0)
    return terms.sum(dim=-1, dtype=torch.float64)
