"""Heads turned towards each other before they are pooled by their mean.

Align attention heads before merging them: An effective way for converting MHA to GQA. Jin et al.
2024, https://arxiv.org/abs/2412.20677: values by an orthogonal matrix for each head (generalized
Procrustes, eq. 6 to 8), keys by a rotation for each pair of numbers that the rotary embedding turns
(eq. 9), both folded into what reads them. Left out: their grouping by similarity of two heads
(`partition` has what is lost), and their masks, which are trained.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.edits.pool.evidence import HeadEvidence, SharedHead


def pool(seen: HeadEvidence, members: Sequence[int]) -> SharedHead:
    """The mean of the heads, each turned to the running mean of those before it."""
    turns, rotations = _turned_keys(seen, members), _turned_values(seen, members)
    m = len(members)
    value_in = rotations.mT.transpose(0, 1).flatten(1) / m
    return SharedHead(tuple(members), turns / m, turns.conj(), value_in, rotations)


def _turned_keys(seen: HeadEvidence, members: Sequence[int]) -> Tensor:
    """What the keys of each head are multiplied by: complex numbers of size 1, [m, F]."""
    gram = seen.key_grams(members)  # [f, h, g]: sum of k_h conj(k_g)
    turns = [torch.ones_like(gram[:, 0, 0])]
    for h in range(1, len(members)):
        # sum of conj(k_h) Σ turn_g k_g, whose phase takes k_h to the mean of those before.
        along = sum(turn * gram[:, g, h] for g, turn in enumerate(turns))
        assert isinstance(along, Tensor)
        size = along.abs()
        turns.append(torch.where(size > 0, along / size.clamp(min=1e-300), 1.0))
    return torch.stack(turns)


def _turned_values(seen: HeadEvidence, members: Sequence[int]) -> Tensor:
    """Orthogonal [m, D, D]: a head's values are about this times the mean of the turned ones."""
    m, width = len(members), seen.width
    gram = seen.value_gram(members).view(m, width, m, width)
    turns = [torch.eye(width, dtype=gram.dtype, device=gram.device)]
    for h in range(1, m):
        cross = sum(gram[h, :, g] @ turn for g, turn in enumerate(turns))
        assert isinstance(cross, Tensor)
        left, _, right = torch.linalg.svd(cross)
        turns.append(left @ right)
    return torch.stack(turns)
