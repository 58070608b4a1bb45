"""A narrower residual stream: one basis for the whole model, and what it makes of each tensor.

Every tensor that touches the residual stream h [hidden] is written for h' = Rᵀ h [k], with one
R [hidden, k] of orthonormal columns: embeddings and readers (q, k, v, gate, up, head) take R behind
them, writers (o, down) Rᵀ before. Before that the gains of norms go into their readers, as a gain a
channel and a rotation do not commute; the norm itself does not see a rotation, as |Rᵀ h| = |h|. So
with k = hidden the model computes what it did (SliceGPT, Ashkboos et al. 2024,
https://arxiv.org/abs/2401.15024), for RMS norms before attention and FFN. SliceGPT has a basis for
each block and matrices between them; one for all needs none, and the result is of a plain class.

`principal` takes the directions in which the normalised stream is largest, summed over all norms,
since what a reader sees is what must be kept. `channels` takes channels as they are, which also
goes with other norms.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress_calibration.moments import Moments


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """directions: fp64 [hidden, k], orthonormal columns. share: how much of the stream's energy at
    the norms (of its scores, where it is of channels) lies in them, 0 to 1."""

    directions: Tensor
    share: float


def normalised(stream: Tensor, eps: float) -> Tensor:
    """What an RMS norm without a gain makes of its input: [..., hidden], in fp32."""
    wide = stream.float()
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)


def principal(gram: Tensor, keep: int) -> Basis:
    """The directions of greatest energy, the greatest first.

    gram: [hidden, hidden], sum of x xᵀ over the normalised inputs x of all norms and tokens.
    """
    assert 0 < keep <= gram.shape[0], f"{keep} of {gram.shape[0]}"
    energy, directions = torch.linalg.eigh(gram.double())
    directions = directions[:, -keep:].flip(1)
    # A direction has no sign of its own; one is chosen, as a resumed run must make the same bytes.
    largest = directions.gather(0, directions.abs().argmax(dim=0, keepdim=True))
    share = energy[-keep:].sum() / energy.sum()
    return Basis(directions * largest.sign(), float(share))


def channels(scores: Tensor, keep: int) -> Basis:
    """The channels with the highest scores, ascending; of equal ones the first.

    scores: [hidden], 0 or more: Minitron's, summed over all norms.
    """
    assert 0 < keep <= len(scores), f"{keep} of {len(scores)}"
    kept = scores.argsort(descending=True, stable=True)[:keep].sort().values
    eye = torch.eye(len(scores), dtype=torch.float64, device=scores.device)
    return Basis(eye[:, kept], float(scores[kept].sum() / scores.sum()))


def rotated_reader(weight: Tensor, gain: Tensor | None, basis: Basis) -> Tensor:
    """W diag(gain) R: [N, hidden] -> fp64 [N, k].

    gain: [hidden], what the norm before the reader multiplies by; None where nothing does, as for
    an embedding or a table of positions, [rows, hidden].
    """
    wide = weight.double() if gain is None else weight.double() * gain.double()
    return wide @ basis.directions


def rotated_writer(weight: Tensor, basis: Basis) -> Tensor:
    """Rᵀ W: [hidden, K] -> fp64 [k, K]; a bias [hidden] -> [k]."""
    return basis.directions.T @ weight.double()


def norm_gain(moments: Moments) -> float:
    """The gain of a norm of the narrower stream, one number for all k channels.

    moments: of what the norm makes of h' without a gain [tokens, k], and of Rᵀ x, what the source's
    norm without a gain made of h, in the basis. The gain is the g of least squared error; with
    fewer channels the mean square is of others, so it is not 1. 1 where nothing was seen.
    """
    seen = float(moments.gram.diagonal().double().sum())
    return float(moments.cross.diagonal().double().sum()) / seen if seen > 0 else 1.0
