"""TransMLA: what others bring keys and values into a latent by, to compare with.

TransMLA: Multi-head latent attention is all you need. Meng et al. 2025,
https://arxiv.org/abs/2502.07864. RoRoPE (section 4.2, equation 19) turns the heads' keys at each
frequency by one real rotation, the same for both numbers of a pair, so that most of their energy is
in one head, which keeps its rotation; the others are read as if nothing rotated them. FreqFold
(appendix C) takes M neighbouring frequencies for one: their components are found together, and the
first of them rotate at the frequencies that the shared key has among these M. Balanced key-value
(equation 20) then brings what is left and the values to the same energy, and takes principal
components of both (appendix D). Queries, `o` and what heads attend to are not looked at.

Ours: M may be below the step between the shared key's frequencies; the authors' code asks for a
multiple of it. Left out: the search for M, and the training behind it, which is `distill`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from compress.edits.latent.evidence import AttentionEvidence
from compress.edits.latent.joint import Started
from compress.edits.latent.rotated import rotated_key
from compress.edits.repair.ridge import Affine


def transmla(
    seen: AttentionEvidence, parts: Mapping[str, Affine], frequencies: Sequence[int], fold: int
) -> Started:
    """seen: of tokens that all count alike."""
    plain = by_size(seen, fold)
    return Started(plain, rotated_key(plain, frequencies))


def by_size(seen: AttentionEvidence, fold: int = 1) -> AttentionEvidence:
    """What is seen where keys and values count by their own size, once for each query head that
    reads them, and nothing else does."""
    queries = torch.eye(seen.key_width, dtype=seen.queries.dtype, device=seen.queries.device)
    outputs = torch.eye(seen.outputs.shape[-1], dtype=queries.dtype, device=queries.device)
    return replace(
        seen,
        queries=queries.expand_as(seen.queries),
        rotation=torch.ones_like(seen.rotation),
        outputs=(outputs * (seen.heads // seen.groups)).expand_as(seen.outputs),
        phases=False,
        fold=fold,
    )
