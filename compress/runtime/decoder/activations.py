"""Activations by transformers' names, in fp32 whatever the dtype.

Not torch's own silu and gelu: their last numbers of a thread's share go through other code than
those before, so that a token's bits would depend on how many tokens there are. exp, tanh and erf
give one result wherever a number lies.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from compress_kernels.ops.rows import Gating
from compress_kernels.reference.rows import gelu_tanh, silu

Activation = Callable[[Tensor], Tensor]


def activation(name: str) -> Activation:
    """The function of a name of `arch.activations`: any dtype -> the same dtype."""
    function = FUNCTIONS[name]
    return lambda x: function(x.float()).to(x.dtype)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp_())


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (x * math.sqrt(0.5)).erf_().add_(1)


def _quick_gelu(x: Tensor) -> Tensor:
    return x / (-1.702 * x).exp_().add_(1)


def _relu2(x: Tensor) -> Tensor:
    positive = torch.relu(x)
    return positive * positive


FUNCTIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": silu,
        "swish": silu,
        "gelu": _gelu,
        "gelu_python": _gelu,
        "gelu_new": gelu_tanh,
        "gelu_fast": gelu_tanh,
        "gelu_accurate": gelu_tanh,
        "gelu_pytorch_tanh": gelu_tanh,
        "gelu_python_tanh": gelu_tanh,
        "quick_gelu": _quick_gelu,
        "relu": torch.relu,
        "relu2": _relu2,
        "sigmoid": _sigmoid,
        "tanh": torch.tanh,
        "linear": lambda x: x,
    }
)

_GATINGS: Mapping[Activation, Gating] = MappingProxyType({silu: "silu", gelu_tanh: "gelu_tanh"})


def gating(name: str) -> Gating | None:
    """How `compress_kernels.ops.rows.gate` calls the function of a name; None where it lacks it."""
    return _GATINGS.get(FUNCTIONS[name])
