"""Round to nearest, with a search for the scale that costs least.

The baseline of every weight-only method and its fallback. For each scale's worth of weights the
search tries `scale_candidates` ranges between the full one and a clipped one and keeps the range
with the least squared rounding error, optionally weighted by how strongly each input column is
driven ("importance", the diagonal of the Hessian; llama.cpp calls it the importance matrix).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.quant.rounding import clip_ratios, round_to_nearest
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import QuantizedTensor

ScaleSearch = Literal["minmax", "mse"]


@dataclass(frozen=True, slots=True)
class RtnConfig:
    """scale_search: "minmax" keeps every weight in range, "mse" clips where that costs less."""

    scale_search: ScaleSearch = "mse"


def quantize(
    weight: Tensor,
    scheme: QuantScheme,
    config: RtnConfig,
    *,
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
) -> QuantizedTensor:
    """Nearest codes for a weight [N, K]; importance: fp32 [K], relative cost of an error."""
    ratios = clip_ratios(config.scale_search, scheme.bits)
    return round_to_nearest(weight, scheme, ratios, scale_dtype=scale_dtype, importance=importance)
