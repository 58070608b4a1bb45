"""What a method says of one layer it quantized, and the one measure all methods are judged by."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.quant.tensor import QuantizedTensor


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A quantized layer.

    error: `relative_error` under the inputs the method was shown.
    method: what made the codes; another name than the stage's when a simpler method was kept.
    kept: why it was kept, None otherwise. damping: share of the mean diagonal added to H.
    dead: columns that calibration never drove, where the method counts them.
    """

    quantized: QuantizedTensor
    error: float
    method: str
    kept: str | None = None
    damping: float | None = None
    dead: int | None = None


def relative_error(weight: Tensor, quantized: Tensor, hessian: Tensor | None) -> float:
    """tr(ΔHΔᵀ) / tr(WHWᵀ) with Δ = W - Q: the share of the output's energy that is lost.

    weight, quantized: fp32 [N, K]. hessian: fp32 [K, K], mean of x xᵀ over the inputs; None for
    the identity. 0 when both traces are 0 (the input is dead).
    """
    delta = weight - quantized
    cost, scale = _energy(delta, hessian), _energy(weight, hessian)
    return max(cost, 0.0) / scale if scale > 0 else 0.0


def _energy(rows: Tensor, hessian: Tensor | None) -> float:
    seen = rows if hessian is None else rows @ hessian
    return float(torch.sum(seen * rows, dtype=torch.float64))
