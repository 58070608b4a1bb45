"""Which numbers of a head are turned against each other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.arch.forward.forward import describe_forward
from compress.formats import Weights


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


def turned_of(weights: Weights, layer: int) -> Turned:
    """Of the heads of keys of a layer; numbers that are not rotated are taken by halves too."""
    kind = describe_forward(weights.checkpoint.config, weights.spec).grouped(layer)
    assert kind.qkv == "parts", "rows of q, k and v lie head by head"
    rotated = 0 if kind.rope is None else kind.rope.dim + kind.rope.dim % 2
    numbers = torch.arange(kind.key_width)
    halves = [x.view(2, -1) for x in (numbers[:rotated], numbers[rotated:])]
    return Turned(*(torch.cat([x[i] for x in halves]) for i in (0, 1)))
