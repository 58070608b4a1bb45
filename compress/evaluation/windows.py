"""Which tokens a model sees at once, and which of them are scored.

A document is cut into windows of at most `window` tokens. The first scores everything in it; each
later one moves on by `stride`, ends where it stops scoring, and so sees `window - stride` tokens of
context or more. Every token is scored exactly once, except the very first of a sequence that has
no BOS: nothing precedes it.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """Tokens start..stop-1 of a sequence are seen, first..stop-1 are scored."""

    start: int
    stop: int
    first: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenWindows:
    """The windows of one text.

    ids: int64 [windows, longest], padded on the right with 0 (a causal model never looks there).
    lengths: int64 [windows], tokens of each window.
    first: int64 [windows], position of the first scored token, 1 or more.
    settings: how the text was cut, for the report.
    """

    name: str
    ids: Tensor
    lengths: Tensor
    first: Tensor
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def scored(self) -> int:
        """Tokens that are scored."""
        return int((self.lengths - self.first).sum())

    @property
    def sha256(self) -> str:
        """Of the tokens: what is scored, and what each of them sees."""
        digest = hashlib.sha256()
        for part in (self.ids, self.lengths, self.first):
            digest.update(repr(tuple(part.shape)).encode() + part.contiguous().numpy().tobytes())
        return digest.hexdigest()


def spans(length: int, window: int, stride: int) -> Iterator[Span]:
    """Windows over a sequence of `length` tokens; none when it has less than two."""
    if length < 2:
        return
    stop = min(window, length)
    yield Span(0, stop, 1)
    while stop < length:
        first, stop = stop, min(stop + stride, length)
        yield Span(stop - window, stop, first)


@dataclass(frozen=True, slots=True)
class WindowRule:
    """How sequences are cut.

    window: tokens seen at once. stride: tokens scored by each window after the first. cut: only
    the first window of each sequence. max_tokens: the first so many scored tokens; the last window
    ends with them, and its tokens have the context that they have without a limit.
    """

    window: int
    stride: int
    cut: bool = False
    max_tokens: int | None = None


def cut_windows(
    name: str,
    sequences: Iterable[Sequence[int]],
    rule: WindowRule,
    settings: dict[str, Any] | None = None,
) -> TokenWindows:
    """Windows over token sequences that already start with BOS where they should."""
    rows: list[Sequence[int]] = []
    first: list[int] = []
    scored = 0
    for sequence in sequences:
        for span in spans(len(sequence), rule.window, rule.stride):
            stop = span.stop
            if rule.max_tokens is not None:
                stop = min(stop, span.first + rule.max_tokens - scored)
            if stop == span.first:
                return _stack(name, rows, first, settings or {})
            rows.append(sequence[span.start : stop])
            first.append(span.first - span.start)
            scored += stop - span.first
            if rule.cut:
                break
    return _stack(name, rows, first, settings or {})


def _stack(
    name: str, rows: Sequence[Sequence[int]], first: Sequence[int], settings: dict[str, Any]
) -> TokenWindows:
    ids = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=torch.int64)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    lengths = torch.tensor([len(tokens) for tokens in rows], dtype=torch.int64)
    return TokenWindows(name, ids, lengths, torch.tensor(first, dtype=torch.int64), settings)
