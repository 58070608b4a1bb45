"""What a decoder does between its matrix products, in plain torch.

Not torch's own silu and gelu: their last numbers of a thread's share go through other code than
those before, so that a token's bits would depend on how many tokens there are. exp, tanh and erf
give one result wherever a number lies.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

_ROOT = math.sqrt(2 / math.pi)


def rms_norm(x: Tensor, weight: Tensor, eps: float, late: bool) -> Tensor:
    """As rows.rms_norm."""
    wide = x.float()
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    if late:
        return (wide * scale * weight).to(x.dtype)
    return weight * (wide * scale).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """As rows.layer_norm."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """As rows.rotate."""
    pairs = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    if interleaved:
        first, second = x[..., : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*(part.to(x.dtype) for part in turned), x[..., 2 * pairs :]), dim=-1)


def silu(x: Tensor) -> Tensor:
    """x: fp32."""
    return x / (-x).exp_().add_(1)


def gelu_tanh(x: Tensor) -> Tensor:
    """x: fp32."""
    return 0.5 * x * (_ROOT * (x + 0.044715 * (x * x * x))).tanh_().add_(1)


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (x * math.sqrt(0.5)).erf_().add_(1)


def _quick_gelu(x: Tensor) -> Tensor:
    return x / (-1.702 * x).exp_().add_(1)


def _relu2(x: Tensor) -> Tensor:
    positive = torch.relu(x)
    return positive * positive


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp_())


# fp32 -> fp32.
FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": silu,
        "gelu_tanh": gelu_tanh,
        "gelu": _gelu,
        "quick_gelu": _quick_gelu,
        "relu": torch.relu,
        "relu2": _relu2,
        "sigmoid": _sigmoid,
        "tanh": torch.tanh,
        "linear": lambda x: x,
    }
)


def activate(x: Tensor, function: str) -> Tensor:
    """As rows.activate."""
    return FUNCTIONS[function](x.float()).to(x.dtype)


def gate(gate: Tensor, up: Tensor, function: str) -> Tensor:
    """As rows.gate."""
    return activate(gate, function) * up


def highest(x: Tensor) -> tuple[Tensor, Tensor]:
    """As rows.highest."""
    index = x.argmax(dim=-1)
    return index, x.gather(-1, index[:, None])[:, 0].float()


def spread(x: Tensor) -> Tensor:
    """x: [..., d]; sums and differences of neighbours at distances of 1, 2, 4, ..."""
    size = x.shape[-1] & -x.shape[-1]
    parts = x.float().reshape(-1, size)
    step = 1
    while step < size:
        pairs = parts.view(-1, size // (2 * step), 2, step)
        a, b = pairs.unbind(-2)
        parts = torch.stack((a + b, a - b), -2).view(-1, size)
        step *= 2
    return (parts / math.sqrt(size)).view(x.shape).to(x.dtype)
