"""What is tried where a weight is rounded to llama.cpp's blocks."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from compress_kernels.super_blocks import BlockLayout


@dataclass(frozen=True, slots=True, eq=False)
class BlockSearch:
    """first, second: fp32 [C], ranges of a sub-block. With minima: what is left of its lowest
    number and of its highest. Without: steps, as shares of its largest number; second is not read.
    rounds: in which codes are chosen for the grid that suits the last ones.
    scale_ratios, minimum_ratios: fp32, d and dmin that are tried, as shares of what the sub-blocks
    want most. shared_rounds: of whole numbers and codes for d and dmin, and d and dmin for those.
    reach: how far whole numbers go in one round.
    spread: errors weigh importance * sqrt(spread * mean(x²) + x²); below 0 importance alone.
    """

    first: Tensor
    second: Tensor
    rounds: int
    scale_ratios: Tensor
    minimum_ratios: Tensor
    shared_rounds: int
    reach: int
    spread: float


# Shares of the range that are tried by bits of a code: the fewer levels, the more a clipped range
# gains.
_RANGES = {
    2: (1.0, 0.92, 0.84, 0.76, 0.68, 0.6, 0.52),
    3: (1.15, 1.08, 1.02, 0.96, 0.9, 0.84, 0.78, 0.72, 0.66, 0.6),
    4: (1.04, 1.0, 0.96, 0.91, 0.86, 0.8, 0.74),
    5: (1.02, 1.0, 0.97, 0.93, 0.88),
    6: (1.02, 1.0, 0.98, 0.96, 0.93, 0.9, 0.86),
    8: (1.003, 1.0, 0.995, 0.985),
}


@cache
def search_of(layout: BlockLayout) -> BlockSearch:
    """The search of a type."""
    ranges = torch.tensor(_RANGES[layout.bits])
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
        3, 1, -1.0,
    )  # fmt: skip


def _units(allowed: tuple[int, int]) -> Tensor:
    if allowed[1] == 1:
        return torch.ones(1)
    ends = [end for end in allowed if end]
    shares = torch.tensor([1.0, 0.98, 0.96, 0.94, 0.92, 0.89, 0.86])
    return torch.cat([shares / end for end in ends])
