"""The latent: what is left of the keys, and the values, in few numbers.

Keys are measured by the scores that they give, values by what the output of attention makes of
them. Both are brought to the same energy, and the principal components of all together are the
latent: so keys and values share it as they need it (TransMLA, arXiv 2502.07864, balances and joins
them too, by the norms of keys and of values).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.edits.latent.evidence import AttentionEvidence
from compress.edits.latent.rotated import RotatedKey, turned_on_average, without

LEAST = 1e-6  # of the largest eigenvalue of a metric: what counts for nothing must stay invertible
TINY = 1e-300  # in place of 0 under a line
NOTHING = 1e-12  # of the energy of values: keys of which less is left are no part of the balance


@dataclass(frozen=True, slots=True, eq=False)
class JointLatent:
    """A latent of R numbers, of mean square 1, in fp64.

    into: [R, G * D + G * V], the latent of keys and values of all heads. keys: [G, D, R] and
    values: [G, V, R], what heads make of it. lost: of the energy of both, the share that it lacks.
    """

    into: Tensor
    keys: Tensor
    values: Tensor
    lost: float


@dataclass(frozen=True, slots=True, eq=False)
class Started:
    """What a latent begins with. seen: what keys and values are measured by. key: the shared one.
    balanced: whether keys and values count alike; else each as much as it has energy."""

    seen: AttentionEvidence
    key: RotatedKey
    balanced: bool = True


def joint_latent(start: Started, rank: int) -> JointLatent:
    """The latent that loses the least, of what a shared key leaves."""
    seen, key = start.seen, start.key
    roots = [_roots(metric) for metric in (*_asked(seen), *seen.outputs)]
    there, back = [root for root, _ in roots], [inverse for _, inverse in roots]
    rest = without(seen, key)
    weighed = _by_head(there, _by_head(there, _left(seen, rest)).T.contiguous())
    balance = torch.ones_like(weighed.diagonal())
    if start.balanced:
        balance[: seen.keys] = _balance(weighed, seen.keys)
    weighed = weighed.mul_(balance[:, None]).mul_(balance).float()  # half the memory
    kept, share = _principal(weighed, rank)
    del weighed
    size = math.sqrt(share.kept / rank) or 1.0
    into = _by_head(there, balance[:, None] * kept).T / size
    into[:, : seen.keys] = into[:, : seen.keys] @ rest
    out = _by_head(back, kept / balance.clamp(min=TINY)[:, None]).mul_(size)
    out[: seen.keys] *= (balance[0] > 0).to(out.dtype)
    keys, values = (
        torch.unflatten(x, 0, (seen.groups, -1)) for x in (out[: seen.keys], out[seen.keys :])
    )
    return JointLatent(into, keys, values, share.lost)


@dataclass(frozen=True, slots=True)
class _Share:
    """kept: energy in a latent. lost: the share of all that is not."""

    kept: float
    lost: float


def _principal(gram: Tensor, rank: int) -> tuple[Tensor, _Share]:
    """Directions of most energy, [n, rank], in fp64; rows of `gram`, fp32, that are 0 are 0 in
    them. They are made orthogonal again."""
    total = float(gram.diagonal().double().sum()) or 1.0
    there = gram.diagonal() > 0
    energy, vectors = torch.linalg.eigh(gram if there.all() else gram[there][:, there])
    kept = torch.linalg.qr(vectors[:, -rank:].double())[0]
    del vectors
    whole = kept.new_zeros(len(there), rank)  # more than there are directions with energy are 0
    whole[there, : kept.shape[1]] = kept
    found = float(energy[-rank:].double().clamp(min=0).sum())
    return whole, _Share(found, max(0.0, 1 - found / total))


def _left(seen: AttentionEvidence, rest: Tensor) -> Tensor:
    """Mean of x xᵀ where x is what is left of the keys, and the values. rest: [G * D, G * D]."""
    left, keys = seen.states.clone(), seen.keys
    left[:keys] = rest @ left[:keys]
    left[:, :keys] = left[:, :keys] @ rest.T
    return left


def _by_head(blocks: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Rows of all heads, [G * D + G * V, n], each head's times a matrix of its own, in place."""
    for block, part in zip(blocks, torch.split(rows, [len(x) for x in blocks]), strict=True):
        part.copy_(block @ part)
    return rows


def _asked(seen: AttentionEvidence) -> Tensor:
    """Mean of q qᵀ of all queries that read a head, as they ask what is not rotated: [G, D, D]."""
    turns = turned_on_average(seen)
    return seen.by_group(turns @ seen.queries @ turns.mT).sum(dim=1)


def _roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric root of a metric, and its inverse."""
    energy, vectors = torch.linalg.eigh(metric)
    most = float(energy[-1])
    root = energy.clamp(min=LEAST * most if most > 0 else 1.0).sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T


def _balance(weighed: Tensor, keys: int) -> float:
    """What brings keys to the energy of values; 0 for keys of which nothing is left."""
    squares = weighed.diagonal()
    of_keys, of_values = float(squares[:keys].sum()), float(squares[keys:].sum())
    if of_values <= 0:
        return 1.0
    return math.sqrt(of_values / of_keys) if of_keys > NOTHING * of_values else 0.0
