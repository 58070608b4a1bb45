"""The fields of compare.json. Sizes are bytes, times seconds; None means "not known"."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from compress.report.codec import record_json
from compress.report.schema import Machine, Source

COMPARISON_VERSION = 1


@dataclass(frozen=True, slots=True)
class Contender:
    """A result. name: the recipe's, or the folder's where finished results are compared.

    bytes: what counts as its size, of `file`: "checkpoint", or the artifact of the runtime that was
    asked for; of "gguf" the quality is that of the file, too. kl: mean KL(source || result) in nats
    a token. top1_agreement: share of tokens where both rank the same token first.
    tokens_per_second: of one text in this engine, as predicted.
    seconds: of its run. command: the line that makes it again; empty where nobody knows.
    notes: what it says of itself. open_with: what starts it, a block to copy each.
    on_kl_front, on_perplexity_front: no other is as small and better.
    """

    name: str
    path: str
    bytes: int
    file: str
    bits_per_weight: float
    kl: float
    perplexity: float
    top1_agreement: float
    kv_bytes_per_token: int | None = None
    tokens_per_second: float | None = None
    seconds: float = 0.0
    command: str = ""
    notes: tuple[str, ...] = ()
    open_with: tuple[str, ...] = ()
    on_kl_front: bool = False
    on_perplexity_front: bool = False


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What is not compared, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the winner must be. runtime: that it is for, as the user named it; None for any.

    within: bytes at most. kl: nats a token at most. fastest: of those that fit the fastest wins.
    """

    runtime: str | None = None
    within: int | None = None
    kl: float | None = None
    fastest: bool = False

    @property
    def is_any(self) -> bool:
        """Whether nothing is asked of the winner, so that there is none."""
        return self.within is None and self.kl is None and not self.fastest

    def fits(self, one: Contender) -> bool:
        small = self.within is None or one.bytes <= self.within
        return small and (self.kl is None or one.kl <= self.kl)


@dataclass(frozen=True, slots=True)
class Measuring:
    """What all were measured on. sha256: of the tokens. perplexity, tokens_per_second: the
    source's."""

    text: str
    tokens: int
    sha256: str
    perplexity: float
    tokens_per_second: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All of compare.json. contenders: the smallest first. winner: the name of one; None where none
    was asked for, or none fits. speed_reason: why no speed was predicted."""

    tool: str
    versions: dict[str, str]
    source: Source
    measured: Measuring
    wanted: Wanted
    contenders: tuple[Contender, ...]
    left_out: tuple[LeftOut, ...]
    machine: Machine
    started: str
    finished: str
    winner: str | None = None
    speed_reason: str | None = None
    schema: int = COMPARISON_VERSION

    @property
    def best(self) -> Contender | None:
        """The winner."""
        return next((x for x in self.contenders if x.name == self.winner), None)

    def to_json(self) -> str:
        """compare.json."""
        return record_json(self)


def by_size(contenders: Iterable[Contender]) -> list[Contender]:
    return sorted(contenders, key=lambda x: (x.bytes, x.kl, x.name))


def chosen(contenders: Iterable[Contender], wanted: Wanted) -> Contender | None:
    """The fastest of those that fit, where that is asked; else the smallest where a KL is the
    limit, and where a size is the one of the least KL. Of equals the smaller, then the better."""
    fit = [x for x in by_size(contenders) if wanted.fits(x)]
    if wanted.is_any or not fit:
        return None
    if wanted.fastest:
        known = [x for x in fit if x.tokens_per_second is not None]
        return max(known, key=lambda x: x.tokens_per_second or 0.0, default=None)
    return fit[0] if wanted.kl is not None else min(fit, key=lambda x: x.kl)


def front(points: Iterable[tuple[str, int, float]]) -> set[str]:
    """Names of points (name, bytes, loss) that no other is as small as and better, or as good as
    and smaller."""
    kept: set[str] = set()
    best, best_at = float("inf"), -1
    for name, size, loss in sorted(points, key=lambda x: (x[1], x[2], x[0])):
        if loss < best or (loss == best and size == best_at):
            kept.add(name)
            best, best_at = loss, size
    return kept
