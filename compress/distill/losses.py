"""What a student is held to: divergences from its teacher's distribution, with their gradients.

A divergence is a function of log-probabilities over the same classes, log q of the student and
log p of the teacher. The classes are the vocabulary, or the teacher's k likeliest tokens and one
more for all the rest (`ChosenClasses`). The gradients are written out: autograd would keep four to
six buffers of [rows, classes] where one is enough.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

DivergenceName = Literal["kl", "reverse_kl", "jsd"]
Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
NO_LABEL = -100  # of a position whose next token is not known


@dataclass(frozen=True, slots=True)
class Objective:
    """(1 - ce) · divergence + ce · cross-entropy with the text's next token + blocks · the relative
    error of block outputs.

    divergence: a key of DIVERGENCES. ce: share of the cross-entropy, 0 to 1. blocks: 0 for none.
    """

    divergence: DivergenceName = "kl"
    ce: float = 0.0
    blocks: float = 0.0


def forward_kl(log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p ‖ q) = Σ p (log p - log q) of each row, and its gradient by the student's logits.

    log_q, log_p: [n, classes] -> [n] and [n, classes]. As for all divergences here: a class with
    p = 0 (log p = -inf) counts as the limit p → 0.
    """
    p = log_p.exp()
    value = _weighted(p, log_p - log_q)
    return value, log_q.exp().sub_(p)


def reverse_kl(log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q ‖ p) = Σ q (log q - log p), with its gradient: see `forward_kl`.

    Infinite where the teacher holds impossible what the student does not.
    """
    q = log_q.exp()
    ratio = log_q - log_p
    value = _weighted(q, ratio)
    return value, _masked(q, ratio - value.unsqueeze(-1))


def jsd(log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Jensen-Shannon divergence, ½ KL(p ‖ m) + ½ KL(q ‖ m) with m = ½ (p + q), with its gradient:
    see `forward_kl`. At most log 2."""
    log_m = torch.logaddexp(log_q, log_p).sub_(torch.tensor(2.0).log().item())
    q = log_q.exp()
    above = log_q - log_m
    own = _weighted(q, above)
    value = (own + _weighted(log_p.exp(), log_p - log_m)).mul_(0.5)
    return value, _masked(q, (above - own.unsqueeze(-1)).mul_(0.5))


DIVERGENCES: Mapping[DivergenceName, Divergence] = MappingProxyType(
    {"kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd}
)


@dataclass(frozen=True, slots=True, eq=False)
class AllClasses:
    """A teacher's logits over its whole vocabulary: [n, vocab]."""

    logits: Tensor

    def against(self, logits: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
        """The divergence of each row and its gradient by `logits`, in fp32 at least.

        logits: the student's [n, its vocab] -> [n] and [n, its vocab]. What one vocabulary has
        beyond the other is padding: it takes no part, and its gradient is 0.
        """
        shared = min(logits.shape[-1], self.logits.shape[-1])
        log_p = log_softmax(wide(self.logits[:, :shared]), -1)
        value, gradient = divergence(log_softmax(wide(logits[:, :shared]), -1), log_p)
        return value, _padded(gradient, logits.shape[-1])


@dataclass(frozen=True, slots=True, eq=False)
class ChosenClasses:
    """A teacher's likeliest tokens and the mass of all others.

    ids: int64 [n, k], different in a row. log_probs: fp32 [n, k]. rest: fp32 [n], the logarithm of
    the mass of the other `vocab - k` tokens; meaningless where there is none (k = vocab).
    vocab: of the logits that it was made of, at most the student's.
    """

    ids: Tensor
    log_probs: Tensor
    rest: Tensor
    vocab: int

    def against(self, logits: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
        """As `AllClasses.against`, over k + 1 classes; tokens of the last one share its gradient
        as they share its mass."""
        assert self.vocab <= logits.shape[-1], "chosen among tokens that the student does not have"
        own = wide(logits[:, : self.vocab])
        ids = self.ids
        chosen = own.gather(1, ids)
        if self.vocab == ids.shape[1]:
            value, by_class = divergence(log_softmax(chosen, -1), log_softmax(self.log_probs, -1))
            gradient = torch.zeros_like(own).scatter_(1, ids, by_class)
            return value, _padded(gradient, logits.shape[-1])
        others = own.scatter(1, ids, float("-inf"))
        behind = others.logsumexp(-1, keepdim=True)  # [n, 1]
        log_q = log_softmax(torch.cat([chosen, behind], 1), -1)
        log_p = log_softmax(torch.cat([self.log_probs, self.rest.unsqueeze(-1)], 1), -1)
        value, by_class = divergence(log_q, log_p)
        gradient = others.sub_(behind).exp_().mul_(by_class[:, -1:])
        gradient.scatter_(1, ids, by_class[:, :-1])
        return value, _padded(gradient, logits.shape[-1])


Classes = AllClasses | ChosenClasses


def choose(logits: Tensor, k: int, vocab: int) -> ChosenClasses:
    """The k likeliest of the first `vocab` tokens in each row, and the exact mass of the rest.

    logits: [n, at least vocab].
    """
    log_p = log_softmax(wide(logits[:, :vocab]), -1)
    top = log_p.topk(min(k, vocab), -1)
    rest = log_p.scatter(1, top.indices, float("-inf")).logsumexp(-1)
    return ChosenClasses(top.indices, top.values, rest, vocab)


def row_losses(
    logits: Tensor, teacher: Classes, labels: Tensor | None, objective: Objective
) -> tuple[Tensor, Tensor]:
    """The objective of each row, and its gradient by the student's logits.

    logits: [n, vocab]. labels: the next token of each row, int64 [n], NO_LABEL where it is not
    known; asked for only where the objective has cross-entropy. -> [n] and [n, vocab], in fp32 at
    least.
    """
    value, gradient = teacher.against(logits, DIVERGENCES[objective.divergence])
    if not objective.ce:
        return value, gradient
    assert labels is not None, "cross-entropy needs the next tokens"
    known = labels != NO_LABEL
    index = labels.clamp_min(0).unsqueeze(-1)  # [n, 1]
    log_q = log_softmax(wide(logits), -1)
    entropy = -log_q.gather(1, index).squeeze(-1) * known
    error = log_q.exp_().scatter_add_(1, index, torch.full_like(value, -1.0).unsqueeze(-1))
    error *= known.unsqueeze(-1)
    share = objective.ce
    return torch.lerp(value, entropy, share), gradient.lerp_(error, share)


def block_output_losses(outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Of each token, the mean over blocks of ‖output - target‖² / ‖target‖².

    Balanced by size: the residual stream grows with depth, and some tokens are a thousand times as
    large as others, so plain squared errors would be those of few blocks and tokens. outputs,
    targets: of each block, [n, hidden]; differentiable by the outputs -> [n].
    """
    shares = [
        (wide(ours) - wide(theirs)).square().sum(-1)
        / wide(theirs).square().sum(-1).clamp_min(1e-30)
        for ours, theirs in zip(outputs, targets, strict=True)
    ]
    return torch.stack(shares).mean(0)


def wide(values: Tensor) -> Tensor:
    """In fp32, or in fp64 where they are that."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Σ weights · values of each row, where 0 · infinity is 0."""
    return _masked(weights, values).sum(-1)


def _masked(weights: Tensor, values: Tensor) -> Tensor:
    product = weights * values
    return product.masked_fill_(weights == 0, 0.0)


def _padded(gradient: Tensor, width: int) -> Tensor:
    missing = width - gradient.shape[-1]
    return torch.nn.functional.pad(gradient, (0, missing)) if missing else gradient
