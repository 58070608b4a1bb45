"""The optimizers of torch that a student may be trained with, and their state as tensors."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from compress.distill.muon import Muon

OptimizerName = Literal["adamw", "muon", "adafactor"]

# No weight decay: the student starts where it should stay near. Betas as in pre-training of
# decoders, since a run has some hundred steps and Adam's 0.999 would remember the first of them.
OPTIMIZERS: Mapping[OptimizerName, Callable[..., torch.optim.Optimizer]] = MappingProxyType(
    {
        "adamw": partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        "muon": Muon,
        "adafactor": partial(torch.optim.Adafactor, weight_decay=0.0),
    }
)


def state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer remembers: "parameter.name" -> tensor; parameters are counted from 0."""
    held: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": value
        for index, state in held.items()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def load_state_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Remember again what `state_tensors` told of an optimizer of the same parameters."""
    held: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        held.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": held, "param_groups": groups})


def make(
    name: OptimizerName,
    parameters: Mapping[str, Tensor],
    rate: float,
    matrices: Collection[str] = (),
) -> torch.optim.Optimizer:
    """A fresh optimizer. parameters: leaves, fp32, in an order that is always the same. matrices:
    which of them are weights of linears in blocks; muon moves them in its own way."""
    groups = [
        {"params": [p for key, p in parameters.items() if (key in matrices) == own], "matrix": own}
        for own in (True, False)
    ]
    return OPTIMIZERS[name]([group for group in groups if group["params"]], lr=rate)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
