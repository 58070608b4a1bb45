"""A singular value decomposition of weights, without data, to compare with.

X-EcoMLA: Upcycling pre-trained attention into MLA. Li et al. 2025,
https://arxiv.org/abs/2503.11132, SVD-based initialization: the shared key is the mean over the
heads of those rows of W_K that keep their rotation, and queries read it as they are. Towards
economical inference (MHA2MLA), Ji et al. 2025, https://arxiv.org/abs/2502.14837, joint SVD: the
other rows of W_K, read as if nothing rotated them, and W_V share the leading singular vectors of
[W_K; W_V].

Ours: which rows rotate. X-EcoMLA takes the last of a head, which are halves of pairs in a llama;
here they are whole pairs, by `rope: stride` or `top`, MHA2MLA's uniform and high frequencies. A
bias is one more column. Left out: MHA2MLA's choice by norms, other pairs in each head, as the stock
class rotates one key; the SVD of queries, which caches nothing; ranks by energy, as the class has
one rank; and the training behind both, which is `distill`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from compress.edits.latent.evidence import AttentionEvidence
from compress.edits.latent.joint import Started
from compress.edits.latent.landing import with_bias
from compress.edits.latent.rotated import RotatedKey
from compress.edits.latent.transmla import by_size
from compress.edits.repair.ridge import Affine


def svd(
    seen: AttentionEvidence, parts: Mapping[str, Affine], frequencies: Sequence[int], fold: int
) -> Started:
    """Each frequency is named once at most, and none is folded."""
    biased = any(parts[role].bias is not None for role in "kv")
    weight = torch.cat([with_bias(parts[role], biased=biased) for role in "kv"])
    plain = replace(by_size(seen), states=weight @ weight.T)
    return Started(plain, mean_key(seen, frequencies), balanced=False)


def mean_key(seen: AttentionEvidence, frequencies: Sequence[int]) -> RotatedKey:
    """The mean of the heads' keys in place of each of them, as large as it is."""
    shape = seen.groups, 1, len(frequencies)
    one = torch.ones(shape, dtype=torch.complex128, device=seen.states.device)
    return RotatedKey(torch.tensor(frequencies), one / seen.groups, one, alone=True)
