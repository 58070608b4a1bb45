"""Which parts of the keys keep their rotation, in the one key that all heads share.

The keys of all heads at one frequency are complex numbers. Their principal components, weighted by
the energy of the queries that read them, are turned by positions like the keys themselves. Those
that keep their rotation are the shared key, which is exact for them. All others go into the latent,
which nothing rotates; there a query is turned by what its rotation is on average.

A frequency may be taken once for each head: the second time it is for its second component, in the
order of what they gain by their rotation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.edits.latent.evidence import AttentionEvidence

LEAST = 1e-6  # of the most energy of queries: what nothing asks for still has a weight
TINY = 1e-300  # in place of an energy of 0 that something is divided by


@dataclass(frozen=True, slots=True, eq=False)
class RotatedKey:
    """S complex numbers of the shared key k', in fp64, whose parts have a mean square of about 1.

    frequencies: int64 [S]. key_in: complex [G, S], k'_s = Σ_g key_in k_g at the frequency of s.
    key_out: complex [G, S], what k'_s is of the keys of head g.
    """

    frequencies: Tensor
    key_in: Tensor
    key_out: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Components:
    """Of the keys at each frequency, those first that gain the most by their rotation.

    gains: [F, G], energy times the share of it that the mean rotation leaves out, 1 - |mean|² of
    the query heads that read the keys. energy: [F, G], of scores. vectors: complex [F, G, G], a
    component in each column, of keys times weights. weights: [G, F].
    """

    gains: Tensor
    energy: Tensor
    vectors: Tensor
    weights: Tensor


def components_of(seen: AttentionEvidence) -> Components:
    """Principal components of the keys by the energy of the scores that they give."""
    asked = seen.by_group(seen.query_energy())  # [G, H / G, F]
    summed = asked.sum(dim=1)
    weights = summed.clamp(min=LEAST * float(summed.max()) or 1.0).sqrt()
    weighted = seen.key_grams() * weights.T[:, :, None] * weights.T[:, None, :]
    energy, vectors = torch.linalg.eigh(weighted)
    energy = energy.clamp(min=0)
    kept = seen.by_group(seen.rotation).abs().square()
    lost = (asked * (1 - kept)).sum(dim=1) / summed.clamp(min=TINY)  # [G, F]
    gains = energy * torch.einsum("gf,fgj->fj", lost.clamp(min=0), vectors.abs().square())
    order = (gains if seen.phases else energy).argsort(dim=1, descending=True)
    moved = order[:, None].expand_as(vectors)
    return Components(
        gains.gather(1, order), energy.gather(1, order), vectors.gather(2, moved), weights
    )


def rotated_key(seen: AttentionEvidence, frequencies: Sequence[int]) -> RotatedKey:
    """The shared key of the components that gain the most, of each frequency as many as it is named
    times.

    It is as large as the latent beside it, which it shares a scale with in caches of 8 bits. The
    factor is a power of two, so nothing is rounded for it.
    """
    parts = components_of(seen)
    met = [list(frequencies[:i]).count(f) for i, f in enumerate(frequencies)]
    at, component = torch.tensor(frequencies), torch.tensor(met)
    vectors = parts.vectors[at, :, component].T  # [G, S]
    square = float(parts.energy[at, component].mean()) / 2
    size = 2.0 ** round(math.log2(square) / 2) if square > 0 else 1.0
    weights = parts.weights[:, at] / size
    return RotatedKey(at, vectors.conj() * weights, vectors / weights)


def without(seen: AttentionEvidence, key: RotatedKey) -> Tensor:
    """What takes the keys of all heads to what the shared key leaves of them: [G * D, G * D]."""
    count, groups = seen.frequencies, seen.groups
    eye = torch.eye(groups, dtype=torch.complex128, device=seen.states.device)
    rest = eye.expand(count, -1, -1).clone()
    shared = -torch.einsum("gs,hs->sgh", key.key_out, key.key_in)
    rest.index_add_(0, key.frequencies.to(rest.device), shared)
    made = seen.states.new_zeros(groups, seen.key_width, groups, seen.key_width)
    real, imaginary = seen.turned.real, seen.turned.imaginary
    made[:, real, :, real] = rest.real
    made[:, imaginary, :, imaginary] = rest.real
    made[:, real, :, imaginary] = -rest.imag
    made[:, imaginary, :, real] = rest.imag
    return made.reshape(seen.keys, seen.keys)


def turned_on_average(seen: AttentionEvidence) -> Tensor:
    """What a query is multiplied with where its keys are not rotated: real [H, D, D]."""
    made = torch.zeros_like(seen.queries)
    real, imaginary = seen.turned.real, seen.turned.imaginary
    made[:, real, real] = seen.rotation.real
    made[:, imaginary, imaginary] = seen.rotation.real
    made[:, real, imaginary] = -seen.rotation.imag
    made[:, imaginary, real] = seen.rotation.imag
    return made


def chosen_frequencies(gained: Tensor, count: int) -> tuple[int, ...]:
    """The `count` of all components that gain the most, as frequencies, ascending. gained: [F, G],
    of a frequency the most first."""
    best = gained.flatten().topk(count).indices // gained.shape[1]
    return tuple(sorted(best.tolist()))
