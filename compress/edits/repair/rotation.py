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

A head that is the embedding has no place for the gain g of the final norm: logits are E diag(g) x,
and E R Rᵀ x without it. So there the stream is first scaled channel by channel, h' = Rᵀ diag(s) h
with s = √g: E diag(s) R, as embedding and as head, then gives E diag(s) R Rᵀ diag(s) x, the logits.
What is lost is that |diag(s) h| is not the same share of |h| for every token, so that a norm of h'
is right on average alone. On tale-6m (7.990; 128 x 256 tokens): hidden 208 of 256 with one matrix
8.805 and 5.01 M parameters, with a head of its own 8.591 and 5.86 M; with one matrix and hidden
243, which has 5.85 M too, 8.103. So the matrix stays one. Without the scale it is worse than either
(32 x 256 tokens, 24 stories: +33 % where it gives +11 %).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress_calibration.moments import Moments


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """directions: fp64 [hidden, k], orthonormal columns. share: how much of the stream's energy at
    the norms (of its scores, where it is of channels) lies in them, 0 to 1. scale: fp64 [hidden],
    above 0, what channels are multiplied by before; None for 1."""

    directions: Tensor
    share: float
    scale: Tensor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the stream goes."""
        return self.directions.shape[0] == self.directions.shape[1]

    @property
    def into(self) -> Tensor:
        """fp64 [hidden, k]: a row of the stream times this is one of the narrow stream."""
        scale = self.scale
        return self.directions if scale is None else scale[:, None] * self.directions

    @property
    def back(self) -> Tensor:
        """fp64 [k, hidden]: a row of the narrow stream times this is the stream, as far as it lies
        in the directions."""
        scale = self.scale
        return self.directions.T if scale is None else self.directions.T / scale


def normalised(stream: Tensor, eps: float) -> Tensor:
    """What an RMS norm without a gain makes of its input: [..., hidden], in fp32."""
    wide = stream.float()
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)


def principal(gram: Tensor, keep: int, scale: Tensor | None = None) -> Basis:
    """The directions of greatest energy, the greatest first.

    gram: [hidden, hidden], sum of x xᵀ over the normalised inputs x of all norms and tokens.
    scale: see `Basis`.
    """
    assert 0 < keep <= gram.shape[0], f"{keep} of {gram.shape[0]}"
    gram = gram.double()
    if scale is not None:
        gram = scale[:, None] * gram * scale
    energy, directions = torch.linalg.eigh(gram)
    directions = directions[:, -keep:].flip(1)
    # A direction has no sign of its own; one is chosen, as a resumed run must make the same bytes.
    largest = directions.gather(0, directions.abs().argmax(dim=0, keepdim=True))
    share = energy[-keep:].sum() / energy.sum()
    return Basis(directions * largest.sign(), float(share), scale)


def channels(scores: Tensor, keep: int) -> Basis:
    """The channels with the highest scores, ascending; of equal ones the first.

    scores: [hidden], 0 or more: Minitron's, summed over all norms.
    """
    assert 0 < keep <= len(scores), f"{keep} of {len(scores)}"
    kept = scores.argsort(descending=True, stable=True)[:keep].sort().values
    eye = torch.eye(len(scores), dtype=torch.float64, device=scores.device)
    return Basis(eye[:, kept], float(scores[kept].sum() / scores.sum()))


def reader_map(gain: Tensor | None, basis: Basis) -> Tensor:
    """What a reader's weight [N, hidden] is multiplied by: fp64 [hidden, k].

    gain: [hidden], what the norm before the reader multiplied by, where the narrow norm no longer
    does; None where nothing did, or where it still does.
    """
    back = basis.back.T
    return back if gain is None else gain.double()[:, None] * back


def rotated_rows(table: Tensor, basis: Basis) -> Tensor:
    """Rows that are added to the stream, of an embedding or of positions: [rows, hidden] -> fp64
    [rows, k]. A writer's weight [hidden, K] has them as columns."""
    return table.double() @ basis.into


def norm_gain(moments: Moments, back: Tensor, metric: Tensor | None = None) -> float:
    """The gain of a norm of the narrower stream, one number for all k channels.

    moments: of what the norm gives without it [tokens, k], and of what the readers saw in the
    source [tokens, N]. back: fp64 [N, k], what brings the one to the other but for the gain, which
    is the g of least squared error; with fewer channels the mean square is of others, so it is not
    1. 1 where nothing was seen. metric: [N, N], what errors are measured in; None for each alike.
    """
    seen_by = back if metric is None else metric @ back
    seen = float((moments.gram.double() * (back.T @ seen_by)).sum())
    return float((moments.cross.double().T * seen_by).sum()) / seen if seen > 0 else 1.0
