"""What an edit is that writes the model for a narrower residual stream.

Its pass looks at all layers first, as one basis is for all of them. Then every block is written for
the stream in that basis: what reads the stream and what writes it is refitted, in the order in
which the block computes.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch

from compress.blocks.live import live_bytes
from compress.checkpoint.outline import Outline
from compress.edits.learned import WRITERS, moments_bytes
from compress.edits.memory import Between, block_weights
from compress.edits.repair.ridge import refit_bytes

Options = TypeVar("Options", contravariant=True)
BasisKind = Literal["pca", "channels"]


class ChooseKind(Protocol[Options]):
    """Which basis a model gets; CheckpointError where it cannot have the one that is asked for."""

    def __call__(self, source: Outline, config: Options) -> BasisKind: ...


@dataclass(frozen=True, slots=True)
class ByBasis:
    """The function of an edit that narrows the residual stream; all else its pass does."""

    kind: ChooseKind[Any]


# Of a block's weights: the source's module, those that the pass reads, what is made of them, and
# the module that computes with that.
BLOCK_COPIES = 4
# fp64 copies of a hidden x hidden matrix while a basis is found or a reader refitted.
SOLVE_COPIES = 8


def narrowing_bytes(models: Between, dtype: torch.dtype, tokens: int) -> int:
    """Most bytes that the pass works with: a block of each chain with a batch of `tokens` tokens,
    and the sums of what it reads or writes; or one block, and a solve."""
    source = models.source
    live = live_bytes(models.given.spec, tokens, dtype.itemsize)
    weights = block_weights(source) * max(dtype.itemsize, 4)  # the first block is tried in fp32
    hidden = source.spec.hidden
    width = max(x.shape[1] for x in source.spec.linears() if x.role in WRITERS)
    sums = moments_bytes(hidden, max(hidden, width))
    solving = max(8 * SOLVE_COPIES * hidden**2, refit_bytes(hidden, width, width))
    return BLOCK_COPIES * weights + 2 * live + sums + solving
