"""The tokens that a student learns from, and which rows of them a step takes.

The order is a function of seed and step alone, so a resumed run draws what the first would have.
Each epoch is a permutation of all rows, from a hash of (seed, epoch, row): no generator whose state
would have to be kept, and the same with every version of torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compress.blocks.sample import uniforms
from compress.distill.losses import NO_LABEL

_HELD = 1 << 62  # stands for the epoch in the draw of the held-out rows


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """TokenRows of tokens of one length, and where they stand among all rows.

    ids: int64 [rows, length]. mask: bool of the same shape, False for padding; None where there is
    none. index: int64 [rows], the place of each in what a teacher keeps.
    """

    ids: Tensor
    mask: Tensor | None
    index: Tensor

    @property
    def tokens(self) -> int:
        """Those that count: padding does not."""
        return self.ids.numel() if self.mask is None else int(self.mask.sum())

    def take(self, places: Tensor, device: str | torch.device = "cpu") -> "TokenRows":
        """Some of the rows. places: int64 [n], positions in this set."""
        mask = None if self.mask is None else self.mask[places].to(device)
        return TokenRows(self.ids[places].to(device), mask, self.index[places])

    def parts(self, size: int, device: str | torch.device = "cpu") -> Iterator["TokenRows"]:
        """At most `size` rows at a time, in order."""
        for places in torch.split(torch.arange(len(self.ids)), size):
            yield self.take(places, device)

    def labels(self) -> Tensor:
        """The next token of each, NO_LABEL behind the last one of a row: int64 [rows · length]."""
        following = torch.full_like(self.ids, NO_LABEL)
        following[:, :-1] = self.ids[:, 1:]
        if self.mask is not None:
            following[:, :-1].masked_fill_(~self.mask[:, 1:], NO_LABEL)
        return following.flatten()


def all_rows(ids: Tensor, mask: Tensor | None = None) -> TokenRows:
    """Of token ids int64 [rows, length] and their mask."""
    return TokenRows(ids, mask, torch.arange(len(ids)))


def split(rows: TokenRows, held: int, seed: int) -> tuple[TokenRows, TokenRows]:
    """TokenRows to train on, and `held` others to measure on."""
    learn, measured = split_places(len(rows.ids), held, seed)
    return rows.take(learn), rows.take(measured)


def split_places(count: int, held: int, seed: int) -> tuple[Tensor, Tensor]:
    """Places 0..count-1 to train on, and `held` others, each in ascending order: int64."""
    drawn = permutation(count, seed, _HELD)
    return drawn[held:].sort().values, drawn[:held].sort().values


def permutation(count: int, seed: int, epoch: int) -> Tensor:
    """Places 0..count-1 in the order of an epoch: int64 [count]."""
    noise = uniforms(seed, np.arange(count), epoch)
    return torch.from_numpy(np.argsort(noise, kind="stable"))


class Order:
    """Which of `count` rows each step takes, `batch` of them.

    An epoch is not cut to whole steps: a step at its end goes on in the next one.
    """

    def __init__(self, count: int, batch: int, seed: int) -> None:
        self.count, self.batch, self.seed = count, batch, seed
        self._epochs: dict[int, Tensor] = {}

    def at(self, step: int) -> Tensor:
        """Places of a step, counted from 0: int64 [batch]."""
        first = step * self.batch
        found = [divmod(first + i, self.count) for i in range(self.batch)]
        self._epochs = {epoch: self._epoch(epoch) for epoch in {epoch for epoch, _ in found}}
        return torch.stack([self._epochs[epoch][place] for epoch, place in found])

    def _epoch(self, epoch: int) -> Tensor:
        known = self._epochs.get(epoch)
        return permutation(self.count, self.seed, epoch) if known is None else known
