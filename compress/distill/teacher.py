"""What a teacher says of tokens: computed at each step, or kept from one run over all rows."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain
from compress.distill.head import Head, Targets
from compress.distill.losses import AllClasses, ChosenClasses, choose
from compress.distill.rows import TokenRows
from compress.distill.student import WholeModel


class Teacher(Protocol):
    """Whoever knows what a student is to say."""

    def targets(self, rows: TokenRows) -> Targets:
        """For all tokens of some rows, laid end to end."""


@dataclass(frozen=True, slots=True, eq=False)
class ResidentTeacher:
    """A whole model in memory that reads the rows of each step."""

    model: WholeModel

    def targets(self, rows: TokenRows) -> Targets:
        with torch.no_grad():
            hidden = self.model.hidden(rows.ids, rows.mask)
        return Computed(hidden.flatten(0, 1), self.model.head)


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """Targets from final states and a head: logits are made when they are asked for."""

    hidden: Tensor  # [n, hidden]
    head: Head

    def of(self, cut: slice) -> AllClasses:
        with torch.no_grad():
            return AllClasses(self.head.run(self.hidden[cut]))


@dataclass(frozen=True, slots=True, eq=False)
class CachedTeacher:
    """The k likeliest tokens of every position and the mass of the rest, and no model.

    ids: int32 [rows, length, k]. log_probs: fp16 of the same shape; fp16 is 2^-11 of log p, so
    0.004 at a probability of e^-8. rest: fp32 [rows, length, 1], exact. vocab: the classes; at most
    the student's.
    """

    ids: HiddenStates
    log_probs: HiddenStates
    rest: HiddenStates
    vocab: int

    def targets(self, rows: TokenRows) -> Targets:
        device = rows.ids.device
        ids, log_probs, rest = (
            _gathered(store, rows.index).to(device).flatten(0, 1)
            for store in (self.ids, self.log_probs, self.rest)
        )
        return _Kept(ChosenClasses(ids.long(), log_probs.float(), rest.squeeze(-1), self.vocab))

    def fill(self, start: int, hidden: Tensor, head: Head) -> None:
        """Keep what a teacher says of rows start.. from their final states.

        hidden: [rows, length, hidden] behind the final norm, on the head's device.
        """
        k, flat = self.ids.shapes[0][-1], hidden.flatten(0, 1)
        step = head.rows_at_once
        with torch.no_grad():
            logits = (head.run(flat[i : i + step]) for i in range(0, len(flat), step))
            parts = [choose(some, k, self.vocab) for some in logits]
        shape = hidden.shape[:2]
        self.ids.write(0, torch.cat([p.ids for p in parts]).view(*shape, k), start)
        self.log_probs.write(0, torch.cat([p.log_probs for p in parts]).view(*shape, k), start)
        self.rest.write(0, torch.cat([p.rest for p in parts]).view(*shape, 1), start)

    def flush(self) -> None:
        """Make what was filled survive a power cut."""
        for store in (self.ids, self.log_probs, self.rest):
            store.flush()


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    classes: ChosenClasses

    def of(self, cut: slice) -> ChosenClasses:
        held = self.classes
        return ChosenClasses(held.ids[cut], held.log_probs[cut], held.rest[cut], held.vocab)


def open_cache(folder: Path, shape: tuple[int, int], k: int, vocab: int) -> CachedTeacher:
    """Files of a cache in `folder`, as an earlier process left them or still to be filled.

    shape: (rows, length).
    """
    k = min(k, vocab)
    ids, chosen, rest = (
        HiddenStates(folder / f"teacher.{name}", [(*shape, width)], dtype)
        for name, width, dtype in (
            ("ids", k, torch.int32),
            ("log_probs", k, torch.float16),
            ("rest", 1, torch.float32),
        )
    )
    return CachedTeacher(ids, chosen, rest, vocab)


def head_of(chain: Chain) -> Head:
    """The output head of a model that is streamed; it stays in memory until its skeleton is told to
    release it. It has no parameters to train."""
    spec = chain.weights.spec
    run = partial(chain.skeleton.logits, chain.weights)
    return Head(run, (), (spec.head_shape or spec.embedding_shape)[0])


def keep_final(chain: Chain, keep: Callable[[int, Tensor], None]) -> None:
    """Give the final states of a chain, whose walk is done, to a cache or a store, batch by batch.

    keep: called with the first row and the states [rows, length, hidden], such as
    `lambda start, states: cache.fill(start, states, head_of(chain))`, or of a store
    `lambda start, states: store.write(0, states, start)`.
    """
    start = 0
    for states in chain.final():
        keep(start, states)
        start += len(states)


def _gathered(store: HiddenStates, rows: Tensor) -> Tensor:
    return torch.cat([store.read(0, row, row + 1) for row in rows.tolist()])
