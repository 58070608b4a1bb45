"""What a method says of one layer it quantized, and the one measure all methods are judged by."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.quant.tensor import QuantizedTensor

ROWS = 256  # of a weight that are looked at at once: enough for a product with the Hessian


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A quantized layer.

    error: `relative_error` under the inputs the method was shown.
    method: what made the codes; another name than the stage's when a simpler method was kept.
    kept: why it was kept, None otherwise. damping: share of the mean diagonal added to H.
    dead: columns that calibration never drove, where the method counts them.
    outlier_columns: how many input columns keep their 16-bit weights, where calibration fixed them.
    plain: error of plain rounding with the same grid and data, where the method compares with it.
    """

    quantized: QuantizedTensor
    error: float
    method: str
    kept: str | None = None
    damping: float | None = None
    dead: int | None = None
    outlier_columns: int | None = None
    plain: float | None = None


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
        runs = _runs(quantized)
        cost = sum((_energy(self.weight[r] - quantized[r], self.hessian) for r in runs), 0.0)
        return max(cost, 0.0) / self.whole if self.whole > 0 else 0.0


def judge(weight: Tensor, hessian: Tensor | None) -> Judge:
    """A judge of one layer [N, K]."""
    w = weight.float()
    return Judge(w, hessian, sum((_energy(w[r], hessian) for r in _runs(w)), 0.0))


def relative_error(weight: Tensor, quantized: Tensor, hessian: Tensor | None) -> float:
    """`Judge.error` of a single proposal."""
    return judge(weight, hessian).error(quantized)


def _runs(weight: Tensor) -> list[slice]:
    """Runs of ROWS rows, which bound what is held beside the weight."""
    return [slice(start, start + ROWS) for start in range(0, weight.shape[0], ROWS)]


def _energy(rows: Tensor, hessian: Tensor | None) -> float:
    seen = rows.clone() if hessian is None else rows @ hessian
    return float(torch.sum(seen.mul_(rows), dtype=torch.float64))
