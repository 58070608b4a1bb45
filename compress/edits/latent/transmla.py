"""TransMLA: what others bring keys and values into a latent by, to compare with.

TransMLA: Multi-head latent attention is all you need. Meng et al. 2025,
https://arxiv.org/abs/2502.07864. Its RoRoPE turns the heads' keys at each frequency by one real
rotation, the same for both numbers of a pair, so that most of their energy is in one head, which
keeps its rotation; the others are read as if nothing rotated them. Its balanced PCA then brings
what is left and the values to the same size, and takes principal components of both. Queries, `o`
and what heads attend to are not looked at. Left out: FreqFold, which folds neighbouring frequencies
into one; and the training behind it, which is `distill`.
"""

from dataclasses import replace

import torch

from compress.edits.latent.evidence import AttentionEvidence


def as_transmla(seen: AttentionEvidence) -> AttentionEvidence:
    """What is seen where only keys and values count, each by its own size. seen: of tokens that all
    count alike."""
    queries, outputs = (
        torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand_as(x)
        for x in (seen.queries, seen.outputs)
    )
    return replace(
        seen,
        queries=queries,
        rotation=torch.ones_like(seen.rotation),
        outputs=outputs,
        phases=False,
    )
