"""Low-rank adapters on the linears of a student, merged into their weights at the end.

W x becomes W x + s · B (A x), with A: [rank, in], B: [out, rank] and s = alpha / rank (2106.09685).
They sit in forward hooks, so the modules stay transformers' own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Of one linear. down: A [rank, in], up: B [out, rank], fp32. transposed: a Conv1D."""

    path: str
    module: nn.Module
    down: nn.Parameter
    up: nn.Parameter
    scale: float
    transposed: bool

    def change(self) -> Tensor:
        """What it adds to the weight, in the order in which the module holds it."""
        product = self.scale * (self.up.detach() @ self.down.detach())
        return product.T if self.transposed else product


def adapt(model: nn.Module, paths: Sequence[str], rank: int, seed: int) -> list[Adapter]:
    """Put an adapter on each linear; B is zero, so nothing changes yet. alpha is twice the rank."""
    drawn = torch.Generator().manual_seed(seed)
    return [_adapter(model.get_submodule(path), path, rank, drawn) for path in paths]


def merge(adapters: Sequence[Adapter]) -> None:
    """Add what they learned to the weights; the hooks then add nothing more."""
    with torch.no_grad():
        for adapter in adapters:
            weight = adapter.module.get_parameter("weight")
            weight.add_(adapter.change())
            adapter.up.zero_()


def _adapter(module: nn.Module, path: str, rank: int, drawn: torch.Generator) -> Adapter:
    weight = module.get_parameter("weight")
    transposed = not isinstance(module, nn.Linear)
    inside, outside = weight.shape if transposed else weight.shape[::-1]
    # As peft and nn.Linear draw it: uniform in ± 1/sqrt(in).
    down = (torch.rand(rank, inside, generator=drawn) * 2 - 1) / inside**0.5
    made = Adapter(
        path,
        module,
        nn.Parameter(down.to(weight.device)),
        nn.Parameter(torch.zeros(outside, rank, device=weight.device)),
        2.0,
        transposed,
    )
    module.register_forward_hook(partial(_added, made))
    return made


def _added(adapter: Adapter, module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
    low = linear(given[0], adapter.down.to(out.dtype))
    return out + adapter.scale * linear(low, adapter.up.to(out.dtype))
