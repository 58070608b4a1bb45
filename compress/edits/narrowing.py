"""What an edit is that writes the model for a narrower residual stream.

Its pass looks at all layers first, as one basis is for all of them. Then every block is written for
the stream in that basis: what reads the stream and what writes it is refitted, in the order in
which the block computes.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol, TypeVar

import torch

from compress.blocks.live import live_bytes
from compress.checkpoint.outline import Outline
from compress.edits.learned import SOLVE_COPIES as LEARNED_COPIES
from compress.edits.learned import WRITERS

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


def narrowing_bytes(source: Outline, dtype: torch.dtype, tokens: int) -> int:
    """Most bytes that the pass works with: a block of each chain with a batch of `tokens` tokens,
    and the sums of what it reads or writes; or one block, and a solve."""
    live = live_bytes(source.spec, tokens, dtype.itemsize)
    block = max(source.spec.blocks, key=lambda x: sum(prod(y.shape) for y in x.linears))
    weights = sum(prod(x.shape) for x in block.linears) * max(dtype.itemsize, 2)
    width = max(k for _, k in (x.shape for x in block.linears if x.role in WRITERS))
    hidden = source.spec.hidden
    sums = 2 * 4 * max(2 * hidden**2, width**2 + width * hidden)
    solving = max(8 * SOLVE_COPIES * hidden**2, 4 * LEARNED_COPIES * width**2)
    return BLOCK_COPIES * weights + 2 * live + sums + solving
