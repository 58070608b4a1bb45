"""What of a student is trained: all of it, the tensors that an edit changed, or adapters."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from compress.distill.lora import Adapter, adapt, merge
from compress.errors import RecipeError

TrainName = Literal["all", "changed", "lora"]


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """parameters: leaves that require gradients, in a fixed order, by the checkpoint's tensor, or
    for an adapter by its path and half. results: tensor of the checkpoint -> the parameter that
    holds it in the end. adapters: to be merged then. matrices: names of the parameters that are
    weights of linears in blocks."""

    parameters: Mapping[str, nn.Parameter]
    results: Mapping[str, nn.Parameter]
    adapters: tuple[Adapter, ...] = ()
    matrices: frozenset[str] = frozenset()

    def settle(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Merge the adapters, round to the dtype that the result is stored in, and give copies in
        it; the student computes with these values from now on."""
        merge(self.adapters)
        rounded = {name: value.detach().to("cpu", dtype) for name, value in self.results.items()}
        with torch.no_grad():
            for name, value in rounded.items():
                self.results[name].copy_(value)
        return rounded


def whole(model: nn.Module, names: Mapping[str, str]) -> Trained:
    """Every parameter. names: tensor of the checkpoint -> path of what it fills in the model."""
    known = {path for path, _ in model.named_parameters(remove_duplicate=False)}
    return only(model, names, [name for name, path in names.items() if path in known])


def only(model: nn.Module, names: Mapping[str, str], tensors: Collection[str]) -> Trained:
    """These tensors of the checkpoint; RecipeError where the model computes with none of them."""
    asked = set(tensors)
    found = {name: model.get_parameter(path) for name, path in names.items() if name in asked}
    if not found:
        raise RecipeError("nothing is left to train; set train: all, or put an edit before it")
    model.requires_grad_(False)
    for parameter in found.values():
        parameter.requires_grad_(True)
    return Trained(found, found)


def adapters(model: nn.Module, linears: Mapping[str, str], rank: int, seed: int) -> Trained:
    """Adapters on linears: tensor of the weight in the checkpoint -> path of the module."""
    model.requires_grad_(False)
    made = adapt(model, list(linears.values()), rank, seed)
    halves = {
        f"{each.path}.{half}": parameter
        for each in made
        for half, parameter in (("down", each.down), ("up", each.up))
    }
    results = {name: model.get_parameter(f"{path}.weight") for name, path in linears.items()}
    return Trained(halves, results, tuple(made))
