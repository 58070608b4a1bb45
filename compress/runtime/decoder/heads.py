"""What each head multiplies with a weight of its own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.runtime.decoder.linear import Linear
from compress.runtime.forms.dense import FloatWeight
from compress.runtime.forms.form import Arithmetic
from compress.runtime.forms.pairs import PairWeight, in_pairs
from compress_kernels.heads import HeadPanels, lay_out_heads
from compress_kernels.ops.linear import head_linear
from compress_kernels.pairs import lay_out_pairs, pair_numbers


@dataclass(frozen=True, slots=True, eq=False)
class HeadLinears:
    """weights: of all heads in one, or where products are in bf16 on a CPU, a linear a head."""

    weights: HeadPanels | tuple[Linear, ...]

    @classmethod
    def of(cls, weights: Tensor, how: Arithmetic) -> "HeadLinears":
        """weights: [heads, N, K], on the device and in the dtype in which dense ones are kept."""
        if not in_pairs(how):
            return cls(lay_out_heads(weights))
        return cls(tuple(_in_pairs(weight.contiguous()) for weight in weights))

    @property
    def linears(self) -> tuple[Linear, ...]:
        """A linear a head; nothing where all heads are one product."""
        return () if isinstance(self.weights, HeadPanels) else self.weights

    @property
    def nbytes(self) -> int:
        if isinstance(self.weights, HeadPanels):
            return self.weights.nbytes
        return sum(linear.weight.nbytes for linear in self.weights)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, heads, K] -> [T, heads, N]."""
        if isinstance(self.weights, HeadPanels):
            return head_linear(x, self.weights)
        parts = x.transpose(0, 1).contiguous()
        found = [linear(part) for linear, part in zip(self.weights, parts, strict=True)]
        return torch.stack(found, 1)


def _in_pairs(weight: Tensor) -> Linear:
    """In panels where these are no larger than the weight."""
    whole = pair_numbers((weight.shape[0], weight.shape[1])) == weight.numel()
    return Linear(PairWeight(lay_out_pairs(weight)) if whole else FloatWeight(weight))
