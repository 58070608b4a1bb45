"""What is tried where a weight is rounded to llama.cpp's blocks."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from compress_kernels.blocks.layouts import BlockLayout


@dataclass(frozen=True, slots=True, eq=False)
class BlockSearch:
    """first, second: fp32 [C], ranges of a sub-block. With minima: what is left of its lowest
    number and of its highest. Without: steps, as shares of its largest number; second is not read.
    rounds: in which codes are chosen for the grid that suits the last ones.
    scale_ratios, minimum_ratios: fp32, d and dmin that are tried, as shares of what the sub-blocks
    want most. shared_rounds: of whole numbers and codes for d and dmin, and d and dmin for those.
    reach: how far whole numbers go in one round.
    """

    first: Tensor
    second: Tensor
    rounds: int
    scale_ratios: Tensor
    minimum_ratios: Tensor
    shared_rounds: int
    reach: int


# Shares of the range that are tried, by bits of a code: from, to, how many. The fewer levels, the
# more a clipped range gains. Both ends of a range with an offset are clipped, each for itself.
_STEPS = {
    3: (1.2, 0.56, 24),
    4: (1.1, 0.64, 24),
    5: (1.06, 0.74, 20),
    6: (1.03, 0.82, 16),
    8: (1.004, 0.98, 5),
}
_ENDS = {2: (1.04, 0.4, 11), 4: (1.04, 0.6, 11), 5: (1.02, 0.78, 9)}


@cache
def search_of(layout: BlockLayout) -> BlockSearch:
    """The search of a type."""
    ranges = torch.linspace(*(_ENDS if layout.minima else _STEPS)[layout.bits])
    if layout.minima:
        first, second = (side.flatten() for side in torch.meshgrid(ranges, ranges, indexing="ij"))
    else:
        ends = (-layout.centre, (1 << layout.bits) - 1 - layout.centre)
        if layout.levels is not None:
            ends = (layout.levels[0], layout.levels[-1])
        first = torch.cat([ranges / end for end in ends])
        second = first
    return BlockSearch(
        first.contiguous(), second.contiguous(), 3,
        _units(layout.scale_range), _units((0, layout.minima) if layout.minima else (1, 1)),
        3, 2,
    )  # fmt: skip


def _units(allowed: tuple[int, int]) -> Tensor:
    if allowed[1] == 1:
        return torch.ones(1)
    ends = [end for end in allowed if end]
    shares = torch.tensor([1.0, 0.98, 0.96, 0.94, 0.92, 0.89, 0.86])
    return torch.cat([shares / end for end in ends])
