"""What a decoder does between its matrix products: every row by itself, rounded as torch would."""

from typing import Literal

import torch
from torch import Tensor

from compress_kernels.cpu import rows as cpu_rows
from compress_kernels.cpu.library import native
from compress_kernels.ops.checks import wrong
from compress_kernels.reference import rows as reference_rows

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
Function = Literal[
    "silu", "gelu_tanh", "gelu", "quick_gelu", "relu", "relu2", "sigmoid", "tanh", "linear"
]


def rms_norm(x: Tensor, weight: Tensor, eps: float, late: bool) -> Tensor:
    """x: floats [..., n] -> x / sqrt(mean(x²) + eps) * weight, the same shape and dtype.

    weight: [n], of x's dtype, multiplied with the rounded quotient; late: fp32, and rounded once,
    behind the product. Raises ValueError on another shape or dtype.
    """
    wanted = torch.float32 if late else x.dtype
    if weight.shape != x.shape[-1:] or weight.dtype != wanted:
        raise wrong("weight", weight, f"{wanted} [{x.shape[-1]}]")
    if _compiled(x):
        return cpu_rows.rms_norm(x, weight, eps, late)
    return reference_rows.rms_norm(x, weight, eps, late)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x: floats [..., n] -> (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, in fp32, rounded
    once: the same shape and dtype.

    weight, bias: [n], of x's dtype. Raises ValueError on another shape or dtype.
    """
    for name, part in (("weight", weight), ("bias", bias)):
        if part is not None and (part.shape != x.shape[-1:] or part.dtype != x.dtype):
            raise wrong(name, part, f"{x.dtype} [{x.shape[-1]}]")
    if _compiled(x):
        return cpu_rows.layer_norm(x, weight, bias, eps)
    return reference_rows.layer_norm(x, weight, bias, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The first numbers of every head turned, the rest as they are. x: [T, heads, head_dim].

    cos, sin: [T, pairs]; in their dtype, where it is wider, is what happens computed. interleaved:
    the two numbers of a pair are neighbours in x, not `pairs` apart; behind it they are that.
    Raises ValueError on other shapes.
    """
    rows, dim = x.shape[0], x.shape[-1]
    if x.dim() != 3 or cos.dim() != 2 or cos.shape[0] != rows or 2 * cos.shape[1] > dim:
        raise wrong("cos", cos, f"[{rows}, up to {dim // 2}]")
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        raise wrong("sin", sin, "what cos is")
    if _compiled(x):
        return cpu_rows.rotate(x, cos, sin, interleaved)
    return reference_rows.rotate(x, cos, sin, interleaved)


def activate(x: Tensor, function: Function) -> Tensor:
    """function(x) of floats [..., n], computed in fp32: the same shape and dtype."""
    if _compiled(x):
        return cpu_rows.activate(x, function)
    return reference_rows.activate(x, function)


def gate(gate: Tensor, up: Tensor, function: Function) -> Tensor:
    """function(gate) * up, all [rows, n] of one dtype; the function's result is rounded to it.

    Raises ValueError where they differ.
    """
    if gate.dim() != 2 or up.shape != gate.shape or up.dtype != gate.dtype:
        raise wrong("up", up, f"{gate.dtype} {list(gate.shape)}")
    if _compiled(gate):
        return cpu_rows.gate(gate, up, function)
    return reference_rows.gate(gate, up, function)


def highest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Where the highest number of each row lies, int64 [rows], of equals the first, and that
    number, fp32 [rows], which is not a number where one of the row is none. x: floats [rows, n].

    Raises ValueError on another shape or dtype.
    """
    if x.dim() != 2 or not x.shape[1] or x.dtype not in FLOATS:
        raise wrong("x", x, "floats [rows, 1 or more]")
    return cpu_rows.highest(x) if _compiled(x) else reference_rows.highest(x)


def spread(x: Tensor) -> Tensor:
    """x: floats [..., d] -> the same shape and dtype, each part of 2^n numbers turned by the
    orthogonal Hadamard matrix of that size, in fp32; 2^n is the largest power of two that divides
    d.

    For keys that are stored in 8 bits (QuaRot, arXiv 2404.00456, section 4.2): a key has a few
    large numbers, always at the same places, and the scale of its codes is that of the largest;
    here they are spread over all places. Queries turned alike give the same scores. On tale-6m it
    takes the KL of an int8 cache from 1.6e-3 to 6e-4.
    """
    return cpu_rows.spread(x) if _compiled(x) else reference_rows.spread(x)


def _compiled(x: Tensor) -> bool:
    return x.device.type == "cpu" and native().library is not None
