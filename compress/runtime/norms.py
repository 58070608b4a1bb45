"""Norms, each row by itself, in fp32 inside."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMS norm, or LayerNorm where `centred`.

    weight: [n], in the dtype of the model, or fp32 with everything that is added to it where it
    multiplies before the result is rounded (late). bias: [n] or None, of a LayerNorm.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool
    late: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., n] -> the same shape and dtype."""
        if self.centred:
            return layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        wide = x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)
        if self.late:
            return (wide * scale * self.weight).to(x.dtype)
        return self.weight * (wide * scale).to(x.dtype)


def through(norm: Norm | None, x: Tensor) -> Tensor:
    """x behind a norm that a block may not have."""
    return x if norm is None else norm(x)
