"""Groups of columns that go or stay together: single channels, heads, KV heads."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """How the K columns of a linear are removed: `width` neighbours at a time.

    width: 1 for FFN channels; head_dim for query heads; head_dim times the heads that share a KV
    head for KV heads. pools: the groups lie in that many equal runs, each of which keeps the same
    number: the KV heads where query heads go, else 1.
    """

    width: int = 1
    pools: int = 1

    def count(self, columns: int) -> int:
        """How many groups K columns make."""
        assert columns % (self.width * self.pools) == 0, f"{columns} columns in {self}"
        return columns // self.width

    def columns(self, kept: Tensor) -> Tensor:
        """The columns of groups: int64 [groups] -> int64 [groups * width]."""
        inner = torch.arange(self.width, device=kept.device)
        return (kept[:, None] * self.width + inner).flatten()

    def rows(self, channels: Tensor) -> Tensor:
        """The channels of each group: [K] -> [groups, width]."""
        return channels.view(self.count(len(channels)), self.width)

    def blocks(self, matrix: Tensor) -> Tensor:
        """Copies of the diagonal blocks: [K, K] -> [groups, width, width]."""
        count = self.count(matrix.shape[0])
        blocks = matrix.view(count, self.width, count, self.width).diagonal(dim1=0, dim2=2)
        return blocks.permute(2, 0, 1).clone()

    def highest(self, scores: Tensor, keep: int) -> Tensor:
        """The groups with the highest scores, as many of each pool: int64 [keep], ascending.

        scores: [groups]. Of equal scores, the first stays.
        """
        assert keep % self.pools == 0, f"{keep} groups of {self.pools} pools"
        rows = scores.view(self.pools, -1)
        best = rows.argsort(dim=1, descending=True, stable=True)[:, : keep // self.pools]
        first = torch.arange(self.pools, device=scores.device)[:, None] * rows.shape[1]
        return (best + first).flatten().sort().values


ALONE = Groups()
