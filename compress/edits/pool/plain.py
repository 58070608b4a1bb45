"""Heads pooled as they are: GQA: Training generalized multi-query transformer models from
multi-head checkpoints. Ainslie et al. 2023, https://arxiv.org/abs/2305.13245 (section 2.1): the
mean of the heads, which they found best, or the first of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.edits.pool.evidence import HeadEvidence, SharedHead


def mean(seen: HeadEvidence, members: Sequence[int]) -> SharedHead:
    """All count alike."""
    return _weighted(seen, members, torch.full((len(members),), 1 / len(members)))


def first(seen: HeadEvidence, members: Sequence[int]) -> SharedHead:
    """The first stands for all."""
    return _weighted(seen, members, torch.eye(len(members))[0])


def _weighted(seen: HeadEvidence, members: Sequence[int], weights: Tensor) -> SharedHead:
    device, m = seen.keys.device, len(members)
    weights = weights.to(seen.keys)
    ones = torch.ones(m, seen.keys.shape[0], dtype=seen.keys.dtype, device=device)
    same = torch.eye(seen.width, dtype=seen.values.dtype, device=device)
    value_in = torch.cat([float(w) * same for w in weights.real], dim=1)
    return SharedHead(
        tuple(members), weights[:, None] * ones, ones, value_in, same.expand(m, -1, -1)
    )
