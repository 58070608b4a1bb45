"""Negative log-likelihood from rows of logits, in fp32 log-softmax summed in fp64."""

import math

import torch
from torch import Tensor


def log_softmax(logits: Tensor) -> Tensor:
    """fp32 log-probabilities of logits [rows, vocab] of any float dtype."""
    return torch.log_softmax(logits.float(), dim=-1)


def nll(log_probs: Tensor, targets: Tensor) -> Tensor:
    """-log p(target): fp32 [rows] from log-probabilities [rows, vocab] and int64 [rows]."""
    return -log_probs.gather(1, targets[:, None])[:, 0]


def perplexity(total_nll: float, tokens: int) -> float:
    """exp of the mean negative log-likelihood; infinite where that overflows."""
    try:
        return math.exp(total_nll / tokens)
    except OverflowError:
        return math.inf
