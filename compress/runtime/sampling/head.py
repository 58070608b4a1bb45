"""From logits to tokens and scores, a bounded number of rows at a time."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from typing import NamedTuple

import torch
from torch import Tensor

from compress.runtime.sampling.sampling import Choice
from compress.runtime.sequences.request import TokenLogprob
from compress.runtime.sequences.sequence import Sequence
from compress_kernels.ops.linear import ROWS

# Of fp32 logits at once. Scores ask for a row a token: 512 rows of 128k logits would be 256 MB.
LOGITS_BYTES = 64 * 2**20

Sampler = Callable[[Tensor, Several[Sequence]], list[Choice | None]]


class LogitsRow(NamedTuple):
    """The logits of a position, for a sequence. at: row of a step's logits."""

    at: int
    sequence: Sequence
    position: int


def rows_at_once(vocabulary: int) -> int:
    """Rows of logits that may be there at once: a multiple of 16."""
    return max(1, LOGITS_BYTES // (4 * vocabulary * ROWS)) * ROWS


def choices(
    logits: Iterable[Tensor], rows: Several[LogitsRow], sampler: Sampler
) -> Iterator[tuple[LogitsRow, Choice | None]]:
    """The choice for each row: a new token, or the score of the token that the text has next.

    logits: fp32 [some rows, vocabulary] at a time. rows: in ascending order of `at`. None where the
    logits are infinite or not a number.
    """
    begin = start = 0
    for some in logits:
        end = begin
        while end < len(rows) and rows[end].at < start + len(some):
            end += 1
        yield from _of_chunk(some, rows[begin:end], start, sampler)
        begin, start = end, start + len(some)


def _of_chunk(
    logits: Tensor, rows: Several[LogitsRow], start: int, sampler: Sampler
) -> Iterator[tuple[LogitsRow, Choice | None]]:
    """start: the row of the decoder's output that the logits begin with."""
    scored = [row for row in rows if row.sequence.scoring]
    if scored:
        yield from zip(scored, _scores(logits, scored, start), strict=True)
    sampled = [row for row in rows if not row.sequence.scoring]
    if sampled:
        places = [row.at - start for row in sampled]
        own = logits.clone() if places == list(range(len(logits))) else logits[places]
        yield from zip(sampled, sampler(own, [row.sequence for row in sampled]), strict=True)


def _scores(logits: Tensor, rows: Several[LogitsRow], start: int) -> list[Choice | None]:
    logprobs, best = logits.log_softmax(dim=-1), logits.argmax(dim=-1)
    indices = torch.tensor([row.at - start for row in rows], device=logits.device)
    targets = [row.sequence.tokens[row.position + 1] for row in rows]
    values = logprobs[indices, torch.tensor(targets, device=logits.device)].tolist()
    greedy = best[indices].tolist()
    # Every log-probability of a row is not a number where one logit is infinite or none.
    return [
        Choice(target, TokenLogprob(target, value, target == most)) if value == value else None
        for target, value, most in zip(targets, values, greedy, strict=True)
    ]
