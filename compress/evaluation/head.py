"""Scores of stored final hidden states: the head's logits exist for a chunk of rows at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.evaluation.divergence import kl
from compress.evaluation.perplexity import log_softmax, nll

# Final hidden states [rows, hidden] -> logits [rows, vocab].
Head = Callable[[Tensor], Tensor]
# (start, stop) of the scored tokens -> final hidden states [stop - start, hidden].
Rows = Callable[[int, int], Tensor]


@dataclass(frozen=True, slots=True)
class FinalStates:
    """One side of the comparison: its final hidden states and its head."""

    rows: Rows
    head: Head


@dataclass(frozen=True, slots=True, eq=False)
class Totals:
    """Sums over the scored tokens of every text, fp64 [texts] (`tokens` int64).

    nll_source is None without a source; kl and agreement too, or when they were not wanted.
    """

    tokens: Tensor
    nll_result: Tensor
    nll_source: Tensor | None
    kl: Tensor | None
    agreement: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class ScoredTokens:
    """What the final hidden states should predict.

    targets: int64 [tokens]. text: int64 [tokens], which of the `texts` texts each belongs to.
    """

    targets: Tensor
    text: Tensor
    texts: int


def score(
    result: FinalStates,
    source: FinalStates | None,
    tokens: ScoredTokens,
    *,
    rows: int,
    divergence: bool = True,
) -> Totals:
    """Sums for every text, computed `rows` tokens at a time.

    divergence: also KL and agreement, when there is a source.
    """
    sums = torch.zeros(4, tokens.texts, dtype=torch.float64)
    for start in range(0, len(tokens.targets), rows):
        stop = min(start + rows, len(tokens.targets))
        chunk = _chunk(result, source, tokens.targets[start:stop], start, divergence)
        # index_add_ of fp64: the order of addition is fixed, so results repeat bit for bit.
        sums.index_add_(1, tokens.text[start:stop], chunk)
    compared = source is not None and divergence
    return Totals(
        tokens=torch.bincount(tokens.text, minlength=tokens.texts),
        nll_result=sums[0],
        nll_source=sums[1] if source is not None else None,
        kl=sums[2] if compared else None,
        agreement=sums[3] if compared else None,
    )


@torch.inference_mode()
def _chunk(
    result: FinalStates, source: FinalStates | None, targets: Tensor, start: int, divergence: bool
) -> Tensor:
    """fp64 [4, rows]: result's nll, source's nll, KL, agreement (0 where not wanted)."""
    stop = start + len(targets)
    values = torch.zeros(4, len(targets), dtype=torch.float64)
    log_q, chosen = _predicted(result, start, stop)
    device_targets = targets.to(log_q.device)
    values[0] = nll(log_q, device_targets)
    if source is None:
        return values
    log_p, before = _predicted(source, start, stop)
    values[1] = nll(log_p, device_targets)
    if divergence:
        values[2] = kl(log_p, log_q)
        values[3] = before == chosen
    return values


def _predicted(model: FinalStates, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities [rows, vocab], and the token of the highest logit, of equals the lowest id:
    int64 [rows]. Log-probabilities are rounded once more, which makes unequal logits near 0 equal:
    the first of them need not be the greedy token."""
    logits = model.head(model.rows(start, stop))
    return log_softmax(logits), logits.argmax(dim=-1)
