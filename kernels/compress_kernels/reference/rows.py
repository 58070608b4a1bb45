"""What a decoder does between its matrix products, in plain torch.

Not torch's own silu and gelu: their last numbers of a thread's share go through other code than
those before, so that a token's bits would depend on how many tokens there are. exp and tanh give
one result wherever a number lies.
"""

import math

import torch
from torch import Tensor

_ROOT = math.sqrt(2 / math.pi)


def rms_norm(x: Tensor, weight: Tensor, eps: float, late: bool) -> Tensor:
    """As rows.rms_norm."""
    wide = x.float()
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    if late:
        return (wide * scale * weight).to(x.dtype)
    return weight * (wide * scale).to(x.dtype)


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


FUNCTIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


def gate(gate: Tensor, up: Tensor, function: str) -> Tensor:
    """As rows.gate."""
    return FUNCTIONS[function](gate.float()).to(gate.dtype) * up


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
