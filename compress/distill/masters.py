"""Weights in fp32 behind parameters that compute in 16 bits.

Mixed Precision Training. Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, section 3.1: a
step is often smaller than what a weight of 8 significant bits can change by, and would be lost.
Left out: scaling of the loss (section 3.2), as bf16 has the exponents of fp32.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, eq=False)
class Masters:
    """parameters: leaves that a student computes with. weights: the same in fp32, which an
    optimizer moves; a parameter that is fp32, or wider, is its own."""

    parameters: Mapping[str, nn.Parameter]
    weights: Mapping[str, nn.Parameter]

    @classmethod
    def of(cls, parameters: Mapping[str, nn.Parameter]) -> "Masters":
        weights = {
            name: x if x.dtype.itemsize >= 4 else nn.Parameter(x.detach().float())
            for name, x in parameters.items()
        }
        return cls(parameters, weights)

    def clear(self) -> None:
        """No gradients."""
        for weight in self.weights.values():
            weight.grad = None

    def gather(self) -> None:
        """The gradients of the parameters are added to those of the weights, and gone."""
        for name, weight in self.weights.items():
            parameter = self.parameters[name]
            if parameter is weight or parameter.grad is None:
                continue
            found, parameter.grad = parameter.grad.float(), None
            weight.grad = found if weight.grad is None else weight.grad.add_(found)

    def spread(self) -> None:
        """The student computes with the weights as they are now, rounded."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                if self.parameters[name] is not weight:
                    self.parameters[name].copy_(weight)
