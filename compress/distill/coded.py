"""The scales of a rounded linear as what is trained: codes and zero points stay.

A scale is what the checkpoint has, times a factor that begins at 1: scales of all sizes then learn
at one rate, and none changes its sign. The module computes with (code - zero) * scale, as whoever
reads the checkpoint does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compress.quant.tensor import QuantizedTensor


@dataclass(frozen=True, slots=True, eq=False)
class CodedLinear:
    """tensor: its weight in the original. factor: fp32, shaped as the scale. start: the scale that
    training began with."""

    tensor: str
    weight: "ScaledCodes"
    factor: nn.Parameter
    start: Tensor

    def settle(self) -> Tensor:
        """The scale as it is stored, which is what the module computes with from now on."""
        with torch.no_grad():
            found = self.weight.stored(self.factor)
            self.weight.begin_at(found)
            self.factor.fill_(1.0)
        return found.cpu()

    def undo(self) -> None:
        """Compute with the scale from before the training."""
        with torch.no_grad():
            self.weight.begin_at(self.start)
            self.factor.fill_(1.0)


class ScaledCodes(nn.Module):
    """From the factors of a weight's scales to the weight, in the order in which the module that it
    is for holds it."""

    def __init__(self, tensor: QuantizedTensor, like: Tensor, *, transposed: bool) -> None:
        super().__init__()
        self.transposed, self.dtype = transposed, like.dtype
        self.groups = tensor.column_groups().to(like.device)
        self.codes = tensor.codes.to(like.device)
        self.zero = None if tensor.zero is None else tensor.zero.to(like.device)
        self.begin_at(tensor.scale.to(like.device))

    def begin_at(self, scale: Tensor) -> None:
        """A factor of 1 means this scale, in the dtype that it is stored in."""
        self.scale = scale

    def stored(self, factor: Tensor) -> Tensor:
        """The scale with these factors as it is stored; one that would be 0 or infinite there stays
        as it was."""
        found = (self.scale.float() * factor).to(self.scale.dtype)
        return torch.where(torch.isfinite(found) & (found != 0), found, self.scale)

    def forward(self, factor: Tensor) -> Tensor:
        scale = self.scale.float() * factor
        height, width = self.codes.shape
        rows = scale.expand(height, -1)[:, self.groups.expand(width)]
        apply: Any = _Product.apply  # torch gives it no types
        weight: Tensor = apply(rows, self.codes, self._zeros()).to(self.dtype)
        return weight.t() if self.transposed else weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return torch.ones_like(self.scale, dtype=torch.float32)

    def _zeros(self) -> Tensor | None:
        return None if self.zero is None else self.zero[:, self.groups]


class _Product(torch.autograd.Function):
    """(code - zero) * scale [N, K]; backward keeps codes, not their floats."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, codes: Tensor, zero: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, zero)
        return _steps(codes, zero).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *flowing: Tensor) -> tuple[Tensor | None, ...]:
        codes, zero = ctx.saved_tensors
        return _steps(codes, zero).mul_(flowing[0]), None, None


def _steps(codes: Tensor, zero: Tensor | None) -> Tensor:
    """Codes over their zero points: fp32 [N, K]."""
    values = codes.float()
    return values if zero is None else values.sub_(zero.float())


def train_scales(
    model: nn.Module, paths: Mapping[str, str], tensors: Mapping[str, tuple[QuantizedTensor, bool]]
) -> list[CodedLinear]:
    """Have linears compute their weights from codes. paths: tensor -> path of the module. tensors:
    tensor -> its codes, and whether the original has it as [K, N]."""
    made = []
    for name, (tensor, transposed) in tensors.items():
        module = model.get_submodule(paths[name])
        weight = ScaledCodes(tensor, module.get_parameter("weight"), transposed=transposed)
        parametrize.register_parametrization(module, "weight", weight, unsafe=True)
        held: Any = module.get_submodule("parametrizations.weight")
        made.append(CodedLinear(name, weight, held.original, weight.scale))
    return made
