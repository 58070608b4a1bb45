"""What of a student is trained: all of it, tensors that an edit changed, adapters, or scales, codes
and norms of a rounded one."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.distill.coded import CodedLinear, Moving, train_codes
from compress.distill.lora import Adapter, adapt, merge
from compress.errors import RecipeError
from compress.quant.tensor import QuantizedTensor


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """parameters: leaves that require gradients, in a fixed order, by the checkpoint's tensor, or
    for an adapter by its path and half. results: tensor of the checkpoint -> the parameter that
    holds it in the end. adapters: to be merged then. matrices: names of the parameters that are
    weights of linears in blocks. coded: linears whose scales are told by factors among the
    parameters, and codes that move by offsets; a result of theirs is the scale [N, G], or the whole
    weight."""

    parameters: Mapping[str, nn.Parameter]
    results: Mapping[str, nn.Parameter]
    adapters: tuple[Adapter, ...] = ()
    matrices: frozenset[str] = frozenset()
    coded: tuple[CodedLinear, ...] = ()

    def settle(
        self, dtype: torch.dtype, weights: Mapping[str, Tensor]
    ) -> dict[str, Tensor | QuantizedTensor]:
        """Merge the adapters, round to the dtype that the result is stored in (scales: to their
        own), and give copies in it; the student computes with these values from now on.

        weights: of the parameters, where they are known better than in the student's dtype."""
        merge(self.adapters)
        exact = {name: weights.get(name, value) for name, value in self.results.items()}
        rounded = {name: value.detach().to("cpu", dtype) for name, value in exact.items()}
        with torch.no_grad():
            for name, value in rounded.items():
                self.results[name].copy_(value)
        return rounded | {each.tensor: each.settle() for each in self.coded}


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


def tuned(
    model: nn.Module,
    names: Mapping[str, str],
    linears: Mapping[str, str],
    codes: Mapping[str, tuple[QuantizedTensor, bool]],
    train: Collection[str],
    moving: Moving | None = None,
) -> Trained:
    """Of a rounded model the "scales" of linears in blocks, the weights of "norms", or both.

    names, linears: as in `whole` and `adapters`. codes: of the linears that are rounded, with
    whether the original has them as [K, N]. moving: how codes move, which are then trained too.
    """
    model.requires_grad_(False)
    norms: dict[str, nn.Parameter] = {}
    if "norms" in train:
        known = {name: value for name, value in model.named_parameters() if value.dim() == 1}
        named = {x: path for x, path in names.items() if path in known and x.endswith(".weight")}
        norms = {name: known[path] for name, path in named.items()}
    coded = train_codes(model, linears, codes, moving) if set(train) - {"norms"} else []
    own = dict(each for linear in coded for each in linear.parameters())
    if "scales" not in train:
        own = {name: value for name, value in own.items() if name not in codes}
    for parameter in (*norms.values(), *own.values()):
        parameter.requires_grad_(True)
    if not norms and not own:
        raise RecipeError(f"the model has no {' and no '.join(sorted(train))} to train")
    return Trained(own | norms, norms, coded=tuple(coded))
