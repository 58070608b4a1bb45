"""Dense weights as they lie in the file, in their own dtype where products read it; for products in
bf16 in panels."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from compress.quant.tensor import InputQuantization
from compress.runtime.forms.form import Arithmetic, LinearFacts, LinearWeight
from compress.runtime.forms.input_rounding import rounded
from compress.runtime.forms.pairs import PairWeight, in_pairs
from compress_kernels.ops.linear import linear, reads
from compress_kernels.pairs import lay_out_pairs, pair_numbers


def kept_in(stored: torch.dtype, how: Arithmetic) -> torch.dtype:
    """The dtype in which an engine keeps a dense weight: the stored one where its products read
    that, which gives what a converted copy gives, to the bit; else that of the products."""
    return stored if reads(stored, how.dtype, how.device) else how.dtype


@dataclass(frozen=True, slots=True, eq=False)
class FloatWeight:
    """values: [N, K], in a dtype that the products read."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def rows(self, index: Tensor) -> Tensor:
        """index: whole numbers [any] -> [any, K]."""
        return self.values[index]

    def matmul(self, x: Tensor, inputs: InputQuantization | None, bias: Tensor | None) -> Tensor:
        x = x if inputs is None else rounded(x, inputs)
        return linear(x, self.values, bias)

    def joined(self, others: tuple[LinearWeight, ...]) -> "FloatWeight | None":
        """None where one of them is kept in another dtype: each keeps its own."""
        dtype = self.values.dtype
        values = [
            other.values
            for other in others
            if isinstance(other, FloatWeight) and other.values.dtype == dtype
        ]
        return (
            FloatWeight(torch.cat((self.values, *values))) if len(values) == len(others) else None
        )


def dense_weight(values: Tensor, how: Arithmetic) -> FloatWeight | PairWeight:
    """values: [N, K], on the device and in the dtype in which dense weights are kept there."""
    if in_pairs(how):
        return PairWeight(lay_out_pairs(values))
    return FloatWeight(values.contiguous())


@dataclass(frozen=True, slots=True)
class DenseForm:
    """Takes every dense weight."""

    name: str = "dense weights"
    joins: bool = True

    def why_not(self, facts: LinearFacts, how: Arithmetic) -> None:
        return None

    def nbytes(self, facts: LinearFacts, how: Arithmetic) -> int:
        """Of outputs and columns that only fill up, too."""
        count = pair_numbers(facts.shape) if in_pairs(how) else prod(facts.shape)
        return count * kept_in(facts.stored, how).itemsize

    def pack(self, weight: Tensor, facts: LinearFacts, how: Arithmetic) -> LinearWeight:
        return dense_weight(weight.to(how.device, kept_in(facts.stored, how)), how)
