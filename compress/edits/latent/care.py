"""CARE: a latent that keeps what keys and values are on data, to compare with.

CARE: Covariance-aware and rank-enhanced decomposition for enabling multi-head latent attention.
Zhou et al. 2026, https://arxiv.org/abs/2603.17946, step (i), activation-preserving factorization:
with W = [W_K; W_V] and C = E[x xᵀ] of what both read, C^½ Wᵀ = P S Uᵀ is cut to the rank and
unwhitened, C^-½ P S Uᵀ. That is Wᵀ U Uᵀ, and U are the eigenvectors of W C Wᵀ = E[y yᵀ], of keys
and values themselves: so neither root is made here. As in the authors' code the keys are those that
TransMLA's RoRoPE and FreqFold leave (transmla.py), and both share one latent, which is step (iii).

Of CARE alone is then: keys and values count by their energy on data, not balanced. Ours: the latent
has mean square 1. Left out: step (ii), a rank of each layer's own, as the stock class has one
kv_lora_rank for all; and what the authors' code adds to C, for an inverse that is not taken here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from compress.edits.latent.evidence import AttentionEvidence
from compress.edits.latent.joint import Started
from compress.edits.latent.transmla import transmla
from compress.edits.repair.ridge import Affine


def care(
    seen: AttentionEvidence, parts: Mapping[str, Affine], frequencies: Sequence[int], fold: int
) -> Started:
    """seen: of tokens that all count alike."""
    return replace(transmla(seen, parts, frequencies, fold), balanced=False)
