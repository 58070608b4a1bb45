"""The next token of each sequence from the logits of its last position."""

from collections.abc import Sequence as Several
from typing import NamedTuple

import torch
from torch import Tensor

from compress.runtime.request import TokenLogprob
from compress.runtime.sequence import Sequence


class Choice(NamedTuple):
    """A chosen (or scored) token; report where log-probabilities are asked."""

    token: int
    report: TokenLogprob | None


def sample(logits: Tensor, sequences: Several[Sequence]) -> list[Choice | None]:
    """logits: fp32 [rows, vocabulary], one row for each sequence; they may be overwritten.

    The most likely token, of equals the one with the lowest id; None where no logit is the highest,
    as some are infinite or not a number.
    """
    _hold_back_ends(logits, sequences)
    best, tokens = logits.max(dim=-1)
    usable = best.isfinite().tolist()
    reports = _reports(logits, sequences, tokens)
    chosen = zip(tokens.tolist(), usable, strict=True)
    return [
        Choice(token, reports.get(row)) if good else None
        for row, (token, good) in enumerate(chosen)
    ]


def _hold_back_ends(logits: Tensor, sequences: Several[Sequence]) -> None:
    """Outputs shorter than min_tokens do not end."""
    for row, sequence in enumerate(sequences):
        if sequence.generated < sequence.sampling.min_tokens and sequence.stop_ids:
            logits[row, list(sequence.stop_ids)] = -torch.inf


def _reports(
    logits: Tensor, sequences: Several[Sequence], tokens: Tensor
) -> dict[int, TokenLogprob]:
    """Row -> log-probabilities, of the sequences that ask for them."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs]
    if not rows:
        return {}
    logprobs = logits[rows].log_softmax(dim=-1)
    most = min(max(sequences[row].sampling.logprobs for row in rows), logits.shape[-1])
    values, ids = (top.tolist() for top in logprobs.topk(most, dim=-1))
    reports = {}
    for at, row in enumerate(rows):
        token, asked = int(tokens[row]), sequences[row].sampling.logprobs
        top = tuple(zip(ids[at][:asked], values[at][:asked], strict=True))
        reports[row] = TokenLogprob(token, float(logprobs[at, token]), token == ids[at][0], top)
    return reports
