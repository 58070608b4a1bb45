"""Which numbers of a head are turned against each other."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Turned:
    """Pairs of numbers of a head, as complex ones: int64 [F] each."""

    real: Tensor
    imaginary: Tensor

    def numbers(self, x: Tensor) -> Tensor:
        """[..., D] as complex [..., F], in fp64."""
        x = x.double()
        return torch.complex(x[..., self.real], x[..., self.imaginary])

    def rows(self, z: Tensor) -> Tensor:
        """Complex [..., F] as [..., D]."""
        made = z.real.new_empty(*z.shape[:-1], 2 * z.shape[-1])
        made[..., self.real], made[..., self.imaginary] = z.real, z.imag
        return made

    def spread(self, x: Tensor) -> Tensor:
        """Real [..., F], alike for both numbers of a pair, as [..., D]."""
        return self.rows(torch.complex(x, x))
