"""One head of keys and values for several, with the least error that a linear map can have.

Keys. For each frequency the keys of m heads are m complex numbers. With w_h the energy of the
queries that read head h, the shared key k' = Σ p_h k_h and the coefficients a_h that lose the least
of Σ w_h |k_h - a_h k'|² follow from the first eigenvector u of the gram of √w k: p = ū √w and
a = u / √w. The a_h go into the queries, which is exact as they commute with the rotation. A
rotation in place of a complex number (Meng et al. 2025, TransMLA, https://arxiv.org/abs/2502.07864,
whose RoRoPE has one real rotation for real and imaginary parts) has half the freedom, and keys that
no query reads count in it as others do.

Values. In the metric M_h = (W_oᵀ W_o)^½ of what becomes of them, the D first eigenvectors U of the
gram of all M v span the values that are kept: value_in = Uᵀ M, value_out = M⁻¹ U.

What is left open, the scale and phase of k' and the scale of v', is chosen so that they are as
large as those of the members, and one head alone keeps its own keys.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.edits.pool.evidence import HeadEvidence, SharedHead

TINY = 1e-12  # of the largest, for what no token drove
LEAST = 1e-8  # of the largest eigenvalue of W_oᵀ W_o; smaller ones count as that


def pool(seen: HeadEvidence, members: Sequence[int]) -> SharedHead:
    """The shared head of these heads that loses the least of scores and outputs."""
    return SharedHead(tuple(members), *_keys(seen, members), *pooled_values(seen, members))


def lost(seen: HeadEvidence, members: Sequence[int]) -> tuple[float, float]:
    """What `pool` loses of scores and of outputs, from eigenvalues alone."""
    of_keys = torch.linalg.eigvalsh(_weighted(seen, members)[0])
    return float(of_keys[:, :-1].sum()), lost_of_values(seen, members)


def lost_of_values(seen: HeadEvidence, members: Sequence[int]) -> float:
    """What outputs lose."""
    of_values = torch.linalg.eigvalsh(_in_metric(seen, members)[0])
    return float(of_values[: -seen.width].sum())


def _weighted(seen: HeadEvidence, members: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The gram of √w k, complex [F, m, m], and √w, [m, F]."""
    energy = seen.queries[list(members)]
    roots = energy.clamp(min=TINY * float(energy.max()) or 1.0).sqrt()
    return seen.key_grams(members) * roots.T[:, :, None] * roots.T[:, None, :], roots


def _keys(seen: HeadEvidence, members: Sequence[int]) -> tuple[Tensor, Tensor]:
    """key_in and key_out, complex [m, F]."""
    gram, roots = _weighted(seen, members)
    values, vectors = torch.linalg.eigh(gram)
    first = vectors[:, :, -1].T  # [m, F]
    largest = first.abs().argmax(dim=0, keepdim=True)
    phase = first.gather(0, largest)
    first = first * (phase.conj() / phase.abs())
    own = seen.key_grams(members).diagonal(dim1=1, dim2=2).real.mean(dim=1)
    # |k'|² = scale² λ, where the members have `own` each.
    found = own > TINY * float(own.max())
    scale = torch.where(found, own / values[:, -1].clamp(min=1e-300), roots[0].square() ** -1)
    scale = scale.sqrt()
    return first.conj() * roots * scale, first / (roots * scale)


def _in_metric(seen: HeadEvidence, members: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The gram of M v, [m * D, m * D], with M and its inverse, [m, D, D]."""
    found, turn = torch.linalg.eigh(seen.outputs[list(members)])
    most = found.amax(dim=1, keepdim=True)
    roots = torch.where(most > 0, found.clamp(min=LEAST * most), 1.0).sqrt()
    metric = (turn * roots[:, None, :]) @ turn.mT
    inverse = (turn / roots[:, None, :]) @ turn.mT
    m, width = len(members), seen.width
    gram = seen.value_gram(members).view(m, width, m, width)
    return (
        torch.einsum("hij,hjgk,gkl->higl", metric, gram, metric).reshape(m * width, m * width),
        metric,
        inverse,
    )


def pooled_values(seen: HeadEvidence, members: Sequence[int]) -> tuple[Tensor, Tensor]:
    """value_in [D, m * D] and value_out [m, D, D]."""
    gram, metric, inverse = _in_metric(seen, members)
    m, width = len(members), seen.width
    found, vectors = torch.linalg.eigh(gram)
    kept = vectors[:, -width:].reshape(m, width, width)  # [m, D, D], columns span v'
    own, energy = seen.value_gram(members).diagonal().sum() / m, found[-width:].sum()
    scale = (own / energy).sqrt() if own > 0 and energy > 0 else torch.ones_like(own)
    value_in = (kept.mT @ metric).transpose(0, 1).reshape(width, m * width)
    return value_in * scale, inverse @ kept / scale
