"""How far the result's next-token distribution is from the source's."""

import torch
from torch import Tensor


def kl(source: Tensor, result: Tensor) -> Tensor:
    """KL(source || result) in nats: fp64 [rows].

    source, result: log-probabilities [rows, vocab], fp32. The terms have both signs and nearly
    cancel when the two are close, so they are summed in fp64. Log-probabilities of fp32 add up to
    1 within some 1e-7 only, which would count in full: a divergence of 5.0e-7 came out as 2.8e-7
    where torch computes with AVX2. So both rows are taken for what they add up to. A source
    probability of zero contributes nothing, whatever the result says.
    """
    terms = source.exp()
    mass, other = (x.sum(dim=-1, dtype=torch.float64) for x in (terms, result.exp()))
    terms *= torch.where(terms > 0, source - result, 0.0)
    return terms.sum(dim=-1, dtype=torch.float64) / mass - (mass / other).log()
