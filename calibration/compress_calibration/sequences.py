"""How large the inputs of a linear are in each sequence, summed over sequences.

Minitron's score of a channel is an aggregate over the batch of an aggregate over each sequence, so
sums over tokens, as Hessians and moments are, do not give it.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.errors import DataError

Aggregate = Literal["mean", "l2", "variance"]
Aggregates = tuple[Aggregate, Aggregate]  # over a sequence, and across sequences
MINITRON: Aggregates = ("mean", "l2")  # the best of the paper's table


@dataclass(slots=True)
class SequenceAccumulator:
    """Sums over sequences of a, the aggregate of each of K features over one sequence.

    over: mean of |x|, l2 norm of x, or variance of x. total, square: fp64 [K], sums of a and a².
    sequences: how many were added. across: the aggregate of a that is looked at in the end.
    """

    key: str
    over: Aggregate
    total: Tensor
    square: Tensor
    sequences: int = 0
    across: Aggregate = "l2"

    @classmethod
    def create(
        cls, key: str, features: int, *, by: Aggregates = MINITRON, device: str = "cpu"
    ) -> "SequenceAccumulator":
        """Empty sums of K = features. by: the aggregate over a sequence, and across them."""
        zeros = torch.zeros(features, dtype=torch.float64, device=device)
        return cls(key, by[0], zeros, zeros.clone(), across=by[1])

    def add(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Add sequences x [sequences, tokens, K]; mask: bool [sequences, tokens], False for
        padding. A sequence of padding alone counts for nothing."""
        assert x.shape[2:] == self.total.shape, f"{self.key}: {tuple(x.shape)}"
        for i, row in enumerate(x):
            tokens = row if mask is None else row[mask[i].bool().to(row.device)]
            if len(tokens):
                seen = _aggregate(tokens, self.over).double()
                self.total += seen
                self.square += seen.square()
                self.sequences += 1

    def aggregate(self) -> Tensor:
        """The aggregate across the sequences so far, fp64 [K].

        Raises DataError before the first sequence, and when an input was NaN or infinite.
        """
        if self.sequences == 0:
            raise DataError(f"no calibration sequence reached the inputs of {self.key}")
        bad = (~self.square.isfinite()).nonzero().flatten()
        if bad.numel():
            raise DataError(
                f"inputs of {self.key} are not finite in {bad.numel()} of {self.square.numel()}"
                f" features (first: {int(bad[0])}); run with --dtype fp32"
            )
        mean = self.total / self.sequences
        if self.across == "mean":
            return mean
        if self.across == "l2":
            return self.square.sqrt()
        return (self.square / self.sequences - mean.square()).clamp(min=0)


def _aggregate(x: Tensor, over: Aggregate) -> Tensor:
    """Aggregate of each feature over one sequence: [tokens, K] -> fp32 [K]."""
    if over == "mean":
        return x.abs().mean(dim=0, dtype=torch.float32)
    if over == "l2":
        norm: Tensor = torch.linalg.vector_norm(x, dim=0, dtype=torch.float32)
        return norm
    return x.float().var(dim=0, correction=0)
