"""What a method says of one layer it quantized, and the one measure all methods are judged by."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.quant.tensor import QuantizedTensor

ELEMENTS = 1 << 21  # of a weight that are looked at at once


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


@dataclass(frozen=True, slots=True, eq=False)
class Judge:
    """Measures what storing Q for one weight W costs, whoever proposes Q.

    weight: fp32 [N, K]. hessian: fp32 [K, K], mean of x xᵀ over the inputs; None for the identity.
    whole: tr(WHWᵀ), computed once for all proposals.
    """

    weight: Tensor
    hessian: Tensor | None
    whole: float

    def error(self, quantized: Tensor) -> float:
        """tr(ΔHΔᵀ) / tr(WHWᵀ) with Δ = W - Q: the share of the output's energy that is lost.

        quantized: fp32 [N, K]. 0 when both traces are 0 (the input is dead).
        """
        step = max(1, ELEMENTS // quantized.shape[1])
        pairs = zip(self.weight.split(step), quantized.split(step), strict=True)
        cost = sum(_energy(rows - lossy, self.hessian) for rows, lossy in pairs)
        return max(cost, 0.0) / self.whole if self.whole > 0 else 0.0


def judge(weight: Tensor, hessian: Tensor | None) -> Judge:
    """A judge of one layer [N, K]."""
    w = weight.float()
    step = max(1, ELEMENTS // w.shape[1])
    return Judge(w, hessian, sum(_energy(rows, hessian) for rows in w.split(step)))


def relative_error(weight: Tensor, quantized: Tensor, hessian: Tensor | None) -> float:
    """`Judge.error` of a single proposal."""
    return judge(weight, hessian).error(quantized)


def _energy(rows: Tensor, hessian: Tensor | None) -> float:
    seen = rows.clone() if hessian is None else rows @ hessian
    return float(torch.sum(seen.mul_(rows), dtype=torch.float64))
