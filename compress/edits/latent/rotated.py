"""Which parts of the keys keep their rotation, in the one key that all heads share.

The keys of all heads at one frequency are complex numbers. Their principal components, weighted by
the energy of the queries that read them, are turned by positions like the keys themselves. Those
that keep their rotation are the shared key, which is exact for them. All others go into the latent,
which nothing rotates; there a query is turned by what its rotation is on average.

A frequency may be taken once for each head: the second time it is for its second component, in the
order of what they gain by their rotation. Neighbouring frequencies may be folded: their components
are found together, and what a component has of each is turned as its own frequency turns.
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
    """S complex numbers of the shared key k', in fp64, whose parts have a mean square of about 1,
    each of M neighbouring frequencies.

    frequencies: int64 [S], that they rotate at. key_in: complex [G, M, S], k'_s = Σ key_in k over
    the heads and the frequencies that s is of. key_out: complex [G, M, S], what k'_s is of the keys
    of a head there. alone: whether all that it leaves of the keys at its frequencies is lost.
    """

    frequencies: Tensor
    key_in: Tensor
    key_out: Tensor
    alone: bool = False

    @property
    def blocks(self) -> Tensor:
        """Of which M frequencies each number is: int64 [S]."""
        return self.frequencies // self.key_in.shape[1]

    @property
    def made_of(self) -> Tensor:
        """The frequencies that each number is of: int64 [M, S]."""
        fold = self.key_in.shape[1]
        return self.blocks * fold + torch.arange(fold, device=self.blocks.device)[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class Components:
    """Of the keys at each M frequencies that are folded, those first that gain the most by their
    rotation. Of keys of G heads: G * M components.

    gains: [F / M, G * M], energy times the share of it that the mean rotation leaves out, 1 -
    |mean|² of the query heads that read the keys. energy: [F / M, G * M], of scores. vectors:
    complex [F / M, G * M, G * M], a component in each column, of keys times weights. weights:
    [F / M, G * M].
    """

    gains: Tensor
    energy: Tensor
    vectors: Tensor
    weights: Tensor


def components_of(seen: AttentionEvidence) -> Components:
    """Principal components of the keys by the energy of the scores that they give."""
    asked = seen.by_group(seen.query_energy())  # [G, H / G, F]
    summed = asked.sum(dim=1)
    weights = seen.by_block(summed.clamp(min=LEAST * float(summed.max()) or 1.0).sqrt())
    weighted = seen.key_grams() * weights[:, :, None] * weights[:, None, :]
    energy, vectors = torch.linalg.eigh(weighted)
    energy = energy.clamp(min=0)
    kept = seen.by_group(seen.rotation).abs().square()
    lost = (asked * (1 - kept)).sum(dim=1) / summed.clamp(min=TINY)  # [G, F]
    lost = seen.by_block(lost.clamp(min=0))
    gains = energy * torch.einsum("fg,fgj->fj", lost, vectors.abs().square())
    order = (gains if seen.phases else energy).argsort(dim=1, descending=True)
    moved = order[:, None].expand_as(vectors)
    return Components(
        gains.gather(1, order), energy.gather(1, order), vectors.gather(2, moved), weights
    )


def rotated_key(seen: AttentionEvidence, frequencies: Sequence[int]) -> RotatedKey:
    """The shared key of the components that gain the most, of each frequency as many as it is named
    times; of folded ones as many as are named of them.

    It is as large as the latent beside it, which it shares a scale with in caches of 8 bits. The
    factor is a power of two, so nothing is rounded for it.
    """
    parts = components_of(seen)
    blocks = [f // seen.fold for f in frequencies]
    component = [blocks[:i].count(block) for i, block in enumerate(blocks)]
    square = float(parts.energy[blocks, component].mean()) / 2
    size = 2.0 ** round(math.log2(square) / 2) if square > 0 else 1.0
    vectors = parts.vectors[blocks, :, component]  # [S, G * M]
    weights = parts.weights[blocks] / size
    key_in, key_out = (
        torch.unflatten(x.T, 0, (seen.groups, seen.fold))
        for x in (vectors.conj() * weights, vectors / weights)
    )
    return RotatedKey(torch.tensor(frequencies), key_in, key_out)


def without(seen: AttentionEvidence, key: RotatedKey) -> Tensor:
    """What takes the keys of all heads to what the shared key leaves of them: [G * D, G * D]."""
    groups, fold = key.key_in.shape[:2]
    device, blocks = seen.states.device, key.blocks
    eye = torch.eye(groups * fold, dtype=torch.complex128, device=device)
    rest = eye.expand(seen.frequencies // fold, -1, -1).clone()
    if key.alone:
        rest[blocks] = 0
    else:
        ways = (x.flatten(0, 1) for x in (key.key_out, key.key_in))  # [G * M, S]
        rest.index_add_(0, blocks.to(device), -torch.einsum("is,js->sij", *ways))
    made = seen.states.new_zeros(groups, seen.key_width, groups, seen.key_width)
    real, imaginary = (x.view(-1, fold) for x in (seen.turned.real, seen.turned.imaginary))
    rest = torch.unflatten(torch.unflatten(rest, 2, (groups, fold)), 1, (groups, fold))
    rest = rest.permute(0, 2, 4, 1, 3)  # [F / M, M, M, G, G]
    for left, right, values in (
        (real, real, rest.real),
        (imaginary, imaginary, rest.real),
        (real, imaginary, -rest.imag),
        (imaginary, real, rest.imag),
    ):
        made[:, left[:, :, None], :, right[:, None]] = values
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
