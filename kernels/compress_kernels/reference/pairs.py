"""Rows in bf16 times a weight in bf16, in plain torch."""

from torch import Tensor

from compress_kernels.pairs import PairPanels, weight_of
from compress_kernels.reference import linear as reference


def pair_linear(x: Tensor, weight: PairPanels, bias: Tensor | None) -> Tensor:
    """As ops.pairs.pair_linear, arguments checked."""
    return reference.linear(x, weight_of(weight), bias)
