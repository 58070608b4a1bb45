"""Keys behind a norm (Qwen3, Gemma 3): what heads share is pooled behind it and fitted before it.

A norm over each head, whose gain is the same for all, stands between q, k and the rotation. So no
factor moves from keys into queries, as in principal.py: all heads of a group read the same k'. Of
Σ w_h |k_h - k'|², with w_h the energy of the queries that read head h at a frequency, the mean of
the normed keys weighted by w loses least. No linear reaches it, as k' is normed too: one is fitted
to that mean before the gain, and the gain then by least squares, number by number, over all groups.
So heads that differ get smaller keys, which a norm alone does not allow.

Values are those of principal.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.edits.pool.evidence import HeadEvidence, SharedHead, lost_keys
from compress.edits.pool.principal import TINY, lost_of_values, pooled_values


def pool(seen: HeadEvidence, members: Sequence[int]) -> SharedHead:
    """The shared head of these heads; its keys are the mean by the queries' energy."""
    weights = _weights(seen, members).to(seen.keys)
    parts = weights, torch.ones_like(weights), *pooled_values(seen, members)
    return SharedHead(tuple(members), *parts)


def lost(seen: HeadEvidence, members: Sequence[int]) -> tuple[float, float]:
    """What scores and outputs lose when these heads share, were the mean reached."""
    return lost_keys(seen, pool(seen, members)), lost_of_values(seen, members)


def _weights(seen: HeadEvidence, members: Sequence[int]) -> Tensor:
    """The part of each head in the shared keys: [m, F], with sum 1 over the heads."""
    energy = seen.queries[list(members)]
    energy = energy.clamp(min=TINY * float(energy.max()) or 1.0)
    return energy / energy.sum(dim=0)
