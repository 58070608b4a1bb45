"""Which experts of a mixture stay.

obs: the experts whose mixture is nearest to what the block should give, with the router's choices
and shares as they are among those that stay. Not all experts are equal (Lu et al. 2024,
https://arxiv.org/abs/2402.14800) measures this of every subset of a block. So does this one up to
SUBSETS of them; of more, experts go one by one, each time the one without which least is lost.
activation: the largest mean of share times norm of the output, over the tokens that an expert gets:
REAP (Lasby et al. 2025, https://arxiv.org/abs/2510.13999), Minitron's score of experts.
contribution: the largest root of Σ share² |output|², over all tokens.
magnitude: the largest weights; looks at no text.

All but the last know a token by the inner products of what the experts make of it. These give the
squared error of any subset exactly, without another forward and whatever hidden is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb
from types import MappingProxyType

import torch
from torch import Tensor

from compress.arch.forward.forward import Routing

SUBSETS = 128  # that are all measured; 70 are there where four of eight stay
# Tokens of which all experts are asked, and bytes of the inner products of what they answer.
TOKENS, PRODUCTS = 8192, 256 << 20
ANSWERS = 1 << 24  # numbers that the experts give at a time


@dataclass(frozen=True, slots=True, eq=False)
class ExpertEvidence:
    """What the experts of a block make of T tokens, each of all of them.

    routing: how the router shares a token out. scores: fp32 [T, E], of the router. products: fp32
    [T, E, E], inner products of what two experts give. asked: fp64 [T, E], inner products of what
    an expert gives and what the mixture should give. energy: fp64 [T], squared norm of the latter.
    held: bool [T], tokens of rows that are held out of fits. sizes: fp64 [E], l2 norm of all
    weights of an expert. A token of zeros is none.
    """

    routing: Routing
    scores: Tensor
    products: Tensor
    asked: Tensor
    energy: Tensor
    held: Tensor
    sizes: Tensor

    @property
    def experts(self) -> int:
        return self.scores.shape[1]


def tokens_asked(experts: int, tokens: int) -> int:
    """How many of all tokens the experts are asked of, at most."""
    return min(tokens, TOKENS, max(1, PRODUCTS // (4 * experts**2)))


def asking_bytes(experts: int) -> int:
    """Most bytes that are held of what the experts of a block answer."""
    return 4 * (experts**2 * tokens_asked(experts, TOKENS) + 3 * ANSWERS) if experts else 0


ChooseExperts = Callable[[ExpertEvidence, int], Tensor]


def shares(scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Shares fp64 [T, chosen] of the experts that a token is sent to, and their int64 indices."""
    found, index = scores.float().softmax(dim=1).double().topk(routing.chosen, dim=1)
    return (found / found.sum(dim=1, keepdim=True) if routing.normalised else found), index


def missed(seen: ExpertEvidence, kept: Tensor) -> Tensor:
    """Squared error of the mixture of the experts that stay, token by token: fp64 [T]."""
    share, place = shares(seen.scores[:, kept], seen.routing)
    return _error(seen, share, kept[place])


def _error(seen: ExpertEvidence, share: Tensor, index: Tensor) -> Tensor:
    """|y - Σ share f|² of every token, from inner products."""
    tokens = torch.arange(len(index), device=index.device)[:, None]
    pairs = seen.products[tokens[:, :, None], index[:, :, None], index[:, None, :]].double()
    given = torch.einsum("ti,tij,tj->t", share, pairs, share)
    return seen.energy - 2 * (share * seen.asked[tokens, index]).sum(dim=1) + given


def by_error(seen: ExpertEvidence, keep: int) -> Tensor:
    """The experts that lose least together; int64 [keep], ascending."""
    if comb(seen.experts, keep) <= SUBSETS:
        device = seen.scores.device
        subsets = [torch.tensor(x, device=device) for x in combinations(range(seen.experts), keep)]
        return min(subsets, key=lambda kept: float(missed(seen, kept).sum()))
    kept = torch.arange(seen.experts, device=seen.scores.device)
    while len(kept) > keep:
        kept = _without_one(seen, kept)
    return kept


def _without_one(seen: ExpertEvidence, kept: Tensor) -> Tensor:
    """Those that stay when the one goes without which least is lost."""
    now = missed(seen, kept)
    _, place = shares(seen.scores[:, kept], seen.routing)
    rises = [_rise(seen, kept, gone, now, place) for gone in range(len(kept))]
    gone = min(range(len(kept)), key=rises.__getitem__)
    return torch.cat([kept[:gone], kept[gone + 1 :]])


def _rise(seen: ExpertEvidence, kept: Tensor, gone: int, now: Tensor, place: Tensor) -> float:
    """What is lost more without one of those that stay. now: what is lost with it; place: which of
    them a token is sent to."""
    left = torch.cat([kept[:gone], kept[gone + 1 :]])
    if not seen.routing.normalised:  # every share is one of all experts
        return float((missed(seen, left) - now).sum())
    sent = (place == gone).any(dim=1).nonzero().flatten()
    return float((missed(_of(seen, sent), left) - now[sent]).sum())


def _of(seen: ExpertEvidence, tokens: Tensor) -> ExpertEvidence:
    """What was seen of some tokens."""
    return replace(
        seen,
        scores=seen.scores[tokens],
        products=seen.products[tokens],
        asked=seen.asked[tokens],
        energy=seen.energy[tokens],
        held=seen.held[tokens],
    )


def by_activation(seen: ExpertEvidence, keep: int) -> Tensor:
    """The experts with the highest mean of share times norm."""
    share, norm = _given(seen)
    sent = (share > 0).sum(dim=0).clamp(min=1)
    return _highest((share * norm).sum(dim=0) / sent, keep)


def by_contribution(seen: ExpertEvidence, keep: int) -> Tensor:
    """The experts with the highest energy."""
    share, norm = _given(seen)
    return _highest((share * norm).square().sum(dim=0), keep)


def by_magnitude(seen: ExpertEvidence, keep: int) -> Tensor:
    """The experts with the largest weights."""
    return _highest(seen.sizes, keep)


def _given(seen: ExpertEvidence) -> tuple[Tensor, Tensor]:
    """The share that each expert has of each token, and the norm of its output: fp64 [T, E]."""
    share, index = shares(seen.scores, seen.routing)
    spread = torch.zeros_like(seen.asked).scatter_(1, index, share)
    return spread, seen.products.diagonal(dim1=1, dim2=2).double().clamp(min=0).sqrt()


def _highest(scores: Tensor, keep: int) -> Tensor:
    """int64 [keep], ascending; of equal scores the first stays."""
    return scores.argsort(descending=True, stable=True)[:keep].sort().values


# By the names that `select` has for channels. What varies around a mean (fluctuation) can be made
# up for by a bias, and experts have none.
EXPERT_CHOICES: Mapping[str, ChooseExperts] = MappingProxyType(
    {
        "obs": by_error,
        "activation": by_activation,
        "contribution": by_contribution,
        "magnitude": by_magnitude,
    }
)
