"""SignRound: the rounding of weights as what is trained (Cheng et al. 2023,
https://arxiv.org/abs/2309.05516).

There (eq. 3) a weight is s * clip(round(W/s + zp + V), n, m), with V trained on the outputs of a
block and gradients that pass the rounding as if it were not there. Here the codes of the stage that
rounded stay the middle: V moves one by at most 1, and begins where that stage left the weight.
Scales are trained beside it as factors (compress/distill/coded.py), in place of the ends of the
range (eq. 4). Steps are Adam's and not the signs of gradients: after 60 steps on int4 g128 of
tale-6m by GPTQ, two blocks had 21 and 19 % less error than with its codes, 19 and 15 % by signs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.quant.tensor import QuantizedTensor

# Share of what rounding left of a weight that V begins with. At 0 no code is nearer to its
# neighbour than another; at 1 those in the middle move for nothing. Block error after 60 steps of
# signs on tale-6m's second block: 0.0125 (0.5, travel 0.7), 0.0132 (0.7, 0.5) and 0.0122 (0.9,
# 0.2); GPTQ: 0.0145.
KEPT = 0.9
# The sum of V's rates over all steps at their peak, of which a schedule takes about half; so more
# steps are smaller ones. KL (and perplexity) after 82 steps of 4 rows: 0.0187 (8.053) at 0.25,
# 0.0186 (8.045) at 0.35, 0.0184 (8.040) at 0.5, 0.0183 (8.040) at 0.7; GPTQ: 0.0220 (8.072).
TRAVEL = 0.5
_MOST = 0.499  # a code begins as it is


def begin(tensor: QuantizedTensor, dense: Tensor) -> Tensor:
    """Where V begins: fp32 [N, K], below half a code. dense: the weight before rounding, [N, K]."""
    codes = grid_of(tensor, tensor.codes.device).steps(tensor.codes)
    left = dense.to(codes).div(tensor.steps().to(codes)).sub_(codes)
    return left.clamp_(-_MOST, _MOST).mul_(KEPT)


def moved(codes: Tensor, place: Tensor, ends: tuple[int, int]) -> Tensor:
    """The codes next to these, by at most 1 and within the ends of their range: int8 [N, K]. place:
    V, fp32 [N, K]."""
    # In fp32, as the int8 of 8 bits would wrap around at the ends.
    return place.round().clamp_(-1, 1).add_(codes).clamp_(*ends).to(torch.int8)


@dataclass(frozen=True, slots=True, eq=False)
class CodeGrid:
    """What codes mean beside their scales. zero: [N, G], None for symmetric ones. groups: int64
    [K], the G of each column. ends: least and largest code."""

    zero: Tensor | None
    groups: Tensor
    ends: tuple[int, int]

    def steps(self, codes: Tensor) -> Tensor:
        """Codes over their zero points: fp32 [N, K]."""
        values = codes.float()
        if self.zero is None:
            return values
        return values.sub_(self.zero.float()[:, self.groups])


def grid_of(tensor: QuantizedTensor, device: torch.device) -> CodeGrid:
    groups = tensor.column_groups().to(device).expand(tensor.shape[1])
    zero, scheme = tensor.zero, tensor.scheme
    ends = scheme.code_min, scheme.code_max
    return CodeGrid(None if zero is None else zero.to(device), groups, ends)


class MovedProduct(torch.autograd.Function):
    """(code - zero) * scale [N, K] of moved codes; scale: [N, G]. V gets the gradient of the weight
    times the scale, but where it is more than a code away or its code at an end of the range."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, place: Tensor, codes: Tensor, grid: CodeGrid) -> Tensor:
        found = moved(codes, place, grid.ends)
        free = found == place.round().add_(codes)
        ctx.save_for_backward(scale, found, free)
        ctx.grid = grid
        return grid.steps(found).mul_(scale[:, grid.groups])

    @staticmethod
    def backward(ctx: Any, *flowing: Tensor) -> tuple[Tensor | None, ...]:
        scale, found, free = ctx.saved_tensors
        grid: CodeGrid = ctx.grid
        of_scale = torch.zeros_like(scale)
        of_scale.index_add_(1, grid.groups, grid.steps(found).mul_(flowing[0]))
        return of_scale, flowing[0] * scale[:, grid.groups] * free, None, None
