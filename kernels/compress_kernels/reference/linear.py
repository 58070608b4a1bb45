"""Rows times a weight, in plain torch."""

import torch
from torch import Tensor

from compress_kernels.heads import HeadPanels


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As linear.linear, arguments checked."""
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def head_linear(x: Tensor, weight: HeadPanels) -> Tensor:
    """As linear.head_linear, arguments checked. Head by head, as a product of all would order its
    sums by their number."""
    parts, values = x.transpose(0, 1).contiguous(), weight.values[..., : weight.outputs]
    found = [part @ of.to(x.dtype) for part, of in zip(parts, values, strict=True)]
    return torch.stack(found, 1)
