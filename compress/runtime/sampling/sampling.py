"""The next token of each sequence from the logits of its last position."""

from collections.abc import Sequence as Several
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from compress.runtime.sampling.filters import restrict
from compress.runtime.sampling.noise import gumbel, key_of
from compress.runtime.sampling.penalties import adjust
from compress.runtime.sampling.ranking import leading
from compress.runtime.sequences.request import TokenLogprob
from compress.runtime.sequences.sequence import Sequence
from compress_kernels.ops.rows import highest as best_of

# Temperatures outside of these make no difference any more, but infinite numbers of fp32.
_COLDEST, _HOTTEST = 2.0**-100, 2.0**100


class Choice(NamedTuple):
    """A chosen (or scored) token; report where log-probabilities are asked."""

    token: int
    report: TokenLogprob | None


class Best(NamedTuple):
    """The token with the highest logit of each row, of equals the lowest id, and that logit."""

    tokens: list[int]
    logits: list[float]

    def choices(self) -> list[Choice | None]:
        """As of sample(), where nothing else is asked of any row (Sampling.greedy)."""
        rows = zip(self.tokens, self.logits, strict=True)
        return [Choice(token, None) if isfinite(most) else None for token, most in rows]


def sample(logits: Tensor, sequences: Several[Sequence]) -> list[Choice | None]:
    """logits: fp32 [rows, vocabulary], one row for each sequence; they may be overwritten.

    At temperature 0 the most likely token, of equals the one with the lowest id; else a draw, by
    noise of seed, index and position. No row has a say in another's choice. Log-probabilities are
    the model's own, before bias, penalties and temperature. None where no logit is the highest, as
    some are infinite or not a number.
    """
    reported = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs]
    plain = logits[reported] if reported else logits
    adjust(logits, sequences)
    tokens, highest = best_of(logits)
    drawn = [row for row, sequence in enumerate(sequences) if sequence.sampling.temperature]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [sequences[row] for row in drawn])
    found = tokens.tolist()
    asked = [(found[row], sequences[row].sampling.logprobs) for row in reported]
    reports = dict(zip(reported, _reports(plain, asked), strict=True))
    return [
        Choice(token, reports.get(row)) if isfinite(most) else None
        for row, (token, most) in enumerate(zip(found, highest.tolist(), strict=True))
    ]


def _draw(logits: Tensor, sequences: Several[Sequence]) -> Tensor:
    """Tokens, int64 [rows], of sequences with a temperature above 0."""
    samplings = [sequence.sampling for sequence in sequences]
    heats = [min(max(s.temperature, _COLDEST), _HOTTEST) for s in samplings]
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled /= torch.tensor(heats, device=logits.device)[:, None]
    scaled = restrict(
        scaled,
        [s.top_k for s in samplings],
        [s.top_p for s in samplings],
        [s.min_p for s in samplings],
    )
    keys = [key_of(s.sampling.seed, s.index, len(s.tokens)) for s in sequences]
    return (scaled + gumbel(keys, logits.shape[-1], logits.device)).argmax(dim=-1)


def _reports(logits: Tensor, asked: list[tuple[int, int]]) -> list[TokenLogprob]:
    """asked: for each row the chosen token and how many of the most likely are reported.

    The most likely are those of the highest logits. log_softmax rounds, so that unequal logits can
    have equal log-probabilities: by these the first of them need not be the greedy token.
    """
    if not asked:
        return []
    logprobs = logits.log_softmax(dim=-1)
    ids = leading(logits, min(max(count for _, count in asked), logits.shape[-1]))
    pairs = zip(ids.tolist(), logprobs.gather(-1, ids).tolist(), strict=True)
    tops = [tuple(zip(*pair, strict=True)) for pair in pairs]
    return [
        TokenLogprob(token, float(logprobs[row, token]), token == top[0][0], top[:count])
        for row, ((token, count), top) in enumerate(zip(asked, tops, strict=True))
    ]
