"""How much a head attends to each token."""

import torch
from torch import Tensor

from compress.arch.forward.rope import Rope
from compress.runtime.decoder.rope import FREQUENCIES


def frequencies(rope: Rope) -> Tensor:
    """Of each pair of numbers, in angles a position: fp64 [F]."""
    return FREQUENCIES[rope.kind](rope)[0].double()


def turns_at(positions: Tensor, angles: Tensor) -> Tensor:
    """The rotation at these positions: complex, fp64 [T, F]."""
    one = torch.ones((), dtype=torch.float64, device=angles.device)
    return torch.polar(one, positions.double()[:, None] * angles)


def shares(asked: Tensor, given: Tensor, later: Tensor, scale: float) -> Tensor:
    """Attention of a head: fp32 [t, T]. asked: complex [t, F], queries; given: complex [T, F],
    keys; both turned. later: bool [t, T], what a query does not see."""
    left, right = (torch.view_as_real(x).flatten(1).float() for x in (asked, given))
    return (left @ right.T * scale).masked_fill(later, -torch.inf).softmax(dim=-1)
