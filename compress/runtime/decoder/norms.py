"""Norms, each row by itself, in fp32 inside."""

from dataclasses import dataclass

from torch import Tensor

from compress_kernels.ops.rows import layer_norm, rms_norm


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
            return layer_norm(x, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps, self.late)


def through(norm: Norm | None, x: Tensor) -> Tensor:
    """x behind a norm that a block may not have."""
    return x if norm is None else norm(x)
