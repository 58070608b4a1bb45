"""What a block computes behind attention: an MLP, or a mixture of them."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from compress.runtime.decoder.linear import Joint, Linear
from compress.runtime.engine.batch import FlatBatch
from compress_kernels.ops.experts import choose_experts
from compress_kernels.ops.rows import Function, activate, gate


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """inner: gate and up, or up alone where the activation gates nothing."""

    inner: Joint
    down: Linear
    function: Function

    def __call__(self, x: Tensor, batch: FlatBatch) -> Tensor:
        """x: [rows, hidden] -> the same shape."""
        first, *up = self.inner(x)
        gated = gate(first, up[0], self.function) if up else activate(first, self.function)
        return self.down(gated)


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """Each token goes through the `chosen` experts that the router gives most.

    normalised: their weights are scaled to add up to 1.
    """

    router: Linear
    experts: tuple[Mlp, ...]
    chosen: int
    normalised: bool

    def __call__(self, x: Tensor, batch: FlatBatch) -> Tensor:
        """x: [rows, hidden] -> the same shape; zero in rows that are padding."""
        logits = self.router(x).float()
        share, index = choose_experts(logits, self.chosen, self.normalised)
        parts = x.new_zeros(self.chosen, *x.shape, dtype=torch.float32)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(index[: batch.count] == number)
            if rows.numel():
                out = self._expert(expert, x, rows, batch).float()
                parts[place, rows] = out * share[rows, place, None]
        total = parts[0]
        for part in parts[1:]:  # one after the other: the order of a sum is part of its result
            total = total + part
        return total.to(x.dtype)

    def _expert(self, expert: Mlp, x: Tensor, rows: Tensor, batch: FlatBatch) -> Tensor:
        """The expert's output for some rows of x, filled up as the batch is."""
        count = rows.numel()
        return expert(x[pad(rows, (0, -count % batch.multiple))], batch)[:count]
