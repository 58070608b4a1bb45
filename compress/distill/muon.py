"""Muon: matrices move by their momentum made orthogonal, so in all directions at one pace.

Muon: an optimizer for hidden layers in neural networks. Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/
Muon is scalable for LLM training. Liu et al. 2025, https://arxiv.org/abs/2502.16982 (the size of a
step, eq. 4: that of AdamW's, so both take one rate)

torch.optim.Muon multiplies in bf16, which takes a processor without such products ten times as long
as the gradients themselves (tale-6m, 16 rows of 256 tokens); here it is fp32. Parameters that are
no matrices of blocks (embeddings, heads, norms, biases) move as by AdamW. Left out: weight decay,
as the student starts where it should stay near.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

MOMENTUM, STEPS = 0.95, 5
BETAS, EPSILON = (0.9, 0.95), 1e-8
# Of the polynomial a x + b (x xT) x + c (x xT)² x, the authors': steep at 0, so after five steps
# singular values of 1e-2 and more of the norm are between 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADAM = 0.2  # root mean square of AdamW's step, as a share of the rate


class Muon(torch.optim.Optimizer):
    """parameters: groups, those with `matrix: True` of matrices [N, K], the rest of any shape."""

    def __init__(self, parameters: Iterable[dict[str, Any]], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "matrix": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch overloads it
        """Move every parameter that has a gradient."""
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            move = _matrix if group["matrix"] else _other
            for parameter in group["params"]:
                if parameter.grad is not None:
                    move(parameter, self.state[parameter], group["lr"])


def _matrix(parameter: Tensor, state: dict[str, Any], rate: float) -> None:
    if not state:
        state["momentum"] = torch.zeros_like(parameter)
    assert parameter.grad is not None
    momentum = state["momentum"].lerp_(parameter.grad, 1 - MOMENTUM)
    ahead = torch.lerp(parameter.grad, momentum, MOMENTUM)  # Nesterov's
    size = ADAM * max(parameter.shape) ** 0.5
    parameter.sub_(orthogonal(ahead), alpha=rate * size)


def orthogonal(matrix: Tensor) -> Tensor:
    """U Vᵀ of the singular vectors, nearly: its singular values are about 1. matrix: [N, K]."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x: Tensor = wide / wide.norm().clamp_min(1e-30)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is matrix else x.T


def _other(parameter: Tensor, state: dict[str, Any], rate: float) -> None:
    """AdamW without decay (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101)."""
    if not state:
        state["step"] = torch.zeros(())
        state["mean"], state["square"] = (torch.zeros_like(parameter) for _ in range(2))
    assert parameter.grad is not None
    state["step"] += 1
    first, second = BETAS
    mean = state["mean"].lerp_(parameter.grad, 1 - first)
    square = state["square"].lerp_(parameter.grad.square(), 1 - second)
    done = int(state["step"])
    size = (square / (1 - second**done)).sqrt_().add_(EPSILON)
    parameter.addcdiv_(mean, size, value=-rate / (1 - first**done))
