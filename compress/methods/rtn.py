"""Round to nearest, with a search for the scale that costs least.

The baseline of every weight-only method and its fallback. For each scale's worth of weights the
search tries ranges between the full one and a clipped one (compress.quant.rounding) and keeps the
range with the least squared rounding error. With calibration data at hand each column's error can
be weighted by how strongly the column is driven ("importance", the diagonal of the Hessian;
llama.cpp calls it the importance matrix), or the errors of a group judged together by what they do
to the output ("output", the group's block of the Hessian; AWQ clips so).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from compress.methods.observed import UNOBSERVED, Needs, Observed
from compress.methods.outcome import Judge, Outcome, judge
from compress.quant.output_scales import scales_by_output
from compress.quant.rounding import clip_ratios, encode, round_to_nearest
from compress.quant.scheme import QuantScheme, Signs
from compress.quant.tensor import QuantizedTensor

ScaleSearch = Literal["minmax", "mse", "importance"]
GroupSearch = Literal["minmax", "mse", "importance", "output"]
UNSEEN = "no token reached the expert: its columns count alike"


@dataclass(frozen=True, slots=True)
class RtnConfig:
    """Options of an `rtn` stage.

    scale_search: "minmax" covers every weight, "mse" clips where that costs less, "importance"
        weighs each column's error by its activations, "output" takes the errors of a group by
        what they do to the output together. The last two need calibration data.
    signs: of the scales that the search tries, where the scheme may have negative ones.
    """

    scale_search: GroupSearch = "mse"
    signs: Signs = "auto"


def needs(config: RtnConfig) -> Needs:
    """A Hessian for the searches that weigh errors by it."""
    return Needs(hessian=config.scale_search in ("importance", "output"))


def why_not(scheme: QuantScheme) -> str | None:
    """Why a scheme is not for rounding to integers (GPTQ's neither), None when it is."""
    if scheme.type == "float":
        return "rounds to integers; use method " + ("nvfp4" if scheme.bits == 4 else "fp8")
    if scheme.activation is not None and scheme.activation.outliers != "none":
        return "knows no outlier columns; use method llm_int8"
    if scheme.granularity == "block":
        return "has no scales for blocks; use granularity group, channel or tensor"
    return None


def quantize(
    weights: Sequence[Tensor],
    scheme: QuantScheme,
    config: RtnConfig,
    *,
    scale_dtype: torch.dtype,
    observed: Observed = UNOBSERVED,
) -> list[Outcome]:
    """Nearest codes for layers [N_i, K] that share an input, observed or not.

    An expert that no token reached has its columns count alike, in the search and in the error.
    """
    kept = UNSEEN if observed.nothing and needs(config).hessian else None
    outcomes = [nearest(judge(w, observed.driven), scheme, config, scale_dtype) for w in weights]
    return [replace(outcome, kept=kept) for outcome in outcomes]


def nearest(
    layer: Judge, scheme: QuantScheme, config: RtnConfig, scale_dtype: torch.dtype
) -> Outcome:
    """One layer rounded to nearest, and what that costs it."""
    q = rounded(layer.weight, scheme, config, layer.hessian, scale_dtype)
    return Outcome(q, layer.error(q.dequantize()), "rtn")


def rounded(
    weight: Tensor,
    scheme: QuantScheme,
    config: RtnConfig,
    hessian: Tensor | None,
    scale_dtype: torch.dtype,
) -> QuantizedTensor:
    """Nearest codes of weight [N, K]; without a Hessian [K, K] all columns count alike."""
    search = config.scale_search
    ratios = clip_ratios("importance" if search == "output" else search, scheme, config.signs)
    if search == "output" and hessian is not None:
        return encode(
            weight, scheme, *scales_by_output(weight, scheme, ratios, scale_dtype, hessian)
        )
    importance = None
    if search == "importance" and hessian is not None:
        importance = column_importance(hessian)
    return round_to_nearest(weight, scheme, ratios, scale_dtype=scale_dtype, importance=importance)


def column_importance(hessian: Tensor) -> Tensor:
    """Diagonal of the Hessian, kept off zero so that a column never seen still counts a little."""
    diagonal = hessian.diagonal()
    return diagonal.clamp_min(1e-6 * float(diagonal.mean()) + 1e-30)
