"""The scales and codes of a rounded linear as what is trained; zero points stay.

A scale is what the checkpoint has, times a factor that begins at 1: scales of all sizes then learn
at one rate, and none changes its sign. The module computes with (code - zero) * scale, as whoever
reads the checkpoint does.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compress.distill import rounding
from compress.distill.rounding import CodeGrid, MovedProduct
from compress.quant.tensor import QuantizedTensor

DenseOf = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Moving:
    """How codes are to move. dense: the weight before rounding by its tensor in the original, as it
    lies there. reach: of V for an offset of 1."""

    dense: DenseOf
    reach: float


@dataclass(frozen=True, slots=True, eq=False)
class CodedLinear:
    """tensor: its weight in the original. weight: fills the module. factor: fp32, shaped as the
    scale. offset: fp32 [N, K], what V is away from its begin; None where codes stay. start: what
    training began with."""

    tensor: str
    weight: "ScaledCodes"
    factor: nn.Parameter
    offset: nn.Parameter | None
    start: QuantizedTensor

    def settle(self) -> Tensor | QuantizedTensor:
        """The scale as it is stored, or the whole weight where codes move, which is what the module
        computes with from now on."""
        with torch.no_grad():
            found = self.weight.stored(self.factor, self.offset)
            self._begin_at(found)
        if self.offset is None:
            return found.scale.cpu()
        return replace(self.start, codes=found.codes.cpu(), scale=found.scale.cpu())

    def undo(self) -> None:
        """Compute with the scale and the codes from before the training."""
        with torch.no_grad():
            self._begin_at(self.start)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What may be trained of it, by names of their own."""
        yield self.tensor, self.factor
        if self.offset is not None:
            yield f"{self.tensor}.offset", self.offset

    def _begin_at(self, tensor: QuantizedTensor) -> None:
        self.weight.begin_at(tensor)
        self.factor.fill_(1.0)
        if self.offset is not None:
            self.offset.zero_()


class ScaledCodes(nn.Module):
    """From the factors of a weight's scales, and where codes move the offsets of these, to the
    weight, in the order in which the module that it is for holds it."""

    def __init__(
        self,
        tensor: QuantizedTensor,
        like: Tensor,
        *,
        transposed: bool,
        begin: Tensor | None = None,
        reach: float = 0.0,
    ) -> None:
        """begin: where V begins, for codes that move."""
        super().__init__()
        self.transposed, self.dtype, self.device = transposed, like.dtype, like.device
        self.grid = rounding.grid_of(tensor, like.device)
        self.begin_at(tensor)
        self.begin = None if begin is None else begin.to(like.device)
        self.reach = reach

    def begin_at(self, tensor: QuantizedTensor) -> None:
        """A factor of 1 means its scale, in the dtype that it is stored in, and an offset of 0 its
        codes."""
        self.tensor = tensor
        self.codes, self.scale = tensor.codes.to(self.device), tensor.scale.to(self.device)
        self.begin = None

    def stored(self, factor: Tensor, offset: Tensor | None) -> QuantizedTensor:
        """The weight as it is stored; a scale that would be 0 or infinite there stays as it was."""
        found = (self.scale.float() * factor).to(self.scale.dtype)
        scale = torch.where(torch.isfinite(found) & (found != 0), found, self.scale)
        codes = self.codes
        if offset is not None:
            codes = rounding.moved(codes, self._place(offset), self.grid.ends)
        return replace(self.tensor, codes=codes, scale=scale)

    def forward(self, factor: Tensor, offset: Tensor | None = None) -> Tensor:
        scale = (self.scale.float() * factor).expand(len(self.codes), -1)
        apply: Any  # torch gives them no types
        if offset is None:
            apply = _Product.apply
            weight: Tensor = apply(scale[:, self.grid.groups], self.codes, self.grid)
        else:
            apply = MovedProduct.apply
            weight = apply(scale, self._place(offset), self.codes, self.grid)
        weight = weight.to(self.dtype)
        return weight.t() if self.transposed else weight

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, ...]:
        # A tuple, of one too: torch holds a single tensor to the weight's dtype, which may be bf16.
        factor = torch.ones_like(self.scale, dtype=torch.float32)
        return (factor,) if self.begin is None else (factor, torch.zeros_like(self.begin))

    def _place(self, offset: Tensor) -> Tensor:
        away = offset * self.reach
        return away if self.begin is None else self.begin + away


class _Product(torch.autograd.Function):
    """(code - zero) * scale [N, K]; backward keeps codes, not their floats."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, codes: Tensor, grid: CodeGrid) -> Tensor:
        ctx.save_for_backward(codes)
        ctx.grid = grid
        return grid.steps(codes).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *flowing: Tensor) -> tuple[Tensor | None, ...]:
        (codes,) = ctx.saved_tensors
        grid: CodeGrid = ctx.grid
        return grid.steps(codes).mul_(flowing[0]), None, None


def train_codes(
    model: nn.Module,
    paths: Mapping[str, str],
    tensors: Mapping[str, tuple[QuantizedTensor, bool]],
    moving: Moving | None = None,
) -> list[CodedLinear]:
    """Have linears compute their weights from codes. paths: tensor -> path of the module. tensors:
    tensor -> its codes, and whether the original has it as [K, N]. moving: None where codes stay.
    """
    made = []
    for name, (tensor, transposed) in tensors.items():
        module, begin, reach = model.get_submodule(paths[name]), None, 0.0
        if moving is not None:
            dense, reach = moving.dense(name), moving.reach
            begin = rounding.begin(tensor, dense.t() if transposed else dense)
        like = module.get_parameter("weight")
        weight = ScaledCodes(tensor, like, transposed=transposed, begin=begin, reach=reach)
        parametrize.register_parametrization(module, "weight", weight, unsafe=True)
        held: Any = module.get_submodule("parametrizations.weight")
        factor, offset = held.original0, None if begin is None else held.original1
        made.append(CodedLinear(name, weight, factor, offset, tensor))
    return made
