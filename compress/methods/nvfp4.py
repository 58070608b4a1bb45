"""NVFP4: weights as E2M1 floats of 4 bits, in groups of 16 with an E4M3 scale each.

NVIDIA's format; described in Pretraining Large Language Models with NVFP4 (NVIDIA 2025),
https://arxiv.org/abs/2509.25149

A weight is code · scale / divisor. The divisor, one fp32 number, is 448 · 6 / max|w|, so that the
group of the largest weight gets the largest scale; plainly a group's scale puts its own largest
weight on 6. Runtimes merge q, k and v, and gate and up, into one matrix each with one divisor, so
the layers that are quantized together share theirs.

The steps of E2M1 are coarse at the top (3, 4, 6), and an E4M3 scale is a coarse number itself. So
the search tries every E4M3 scale near the plain one and keeps the one with the least squared
error; larger ones, which put the largest weight on 4, are among them (Four Over Six, Cook et al.
2025, arXiv 2512.02010, compares just those two).

Left out: E2M1 activations, stochastic rounding and random Hadamard transforms, which the paper has
for training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.methods.observed import UNOBSERVED, Needs, Observed
from compress.methods.outcome import Outcome, judge
from compress.methods.rtn import UNSEEN, ScaleSearch, column_importance
from compress.quant.floats import global_scale, quantize_fp4
from compress.quant.scheme import FP4_GROUP, QuantScheme

# E4M3 numbers around the plain scale, 8 to an octave: the largest weight of a group lands between
# 3 and 9 before saturation. Two more on either side gain nothing (tale-6m, normal weights).
OFFSETS = (0, -1, 1, -2, 2, -3, 3, -4, 4, 5, 6, 7)


@dataclass(frozen=True, slots=True)
class Nvfp4Config:
    """Options of an `nvfp4` stage.

    scale_search: "minmax" puts the largest weight of a group on 6, "mse" tries the E4M3 scales
        around that for the least squared error, "importance" weighs each column's error by its
        activations, and so needs calibration data.
    """

    scale_search: ScaleSearch = "mse"


def needs(config: Nvfp4Config) -> Needs:
    """A Hessian for the search that weighs errors by it."""
    return Needs(hessian=config.scale_search == "importance")


def why_not(scheme: QuantScheme) -> str | None:
    """Why a scheme is not for NVFP4, None when it is."""
    if scheme.type != "float":
        return "stores floats; use method rtn or gptq, or scheme NVFP4A16"
    if scheme.bits != 4:
        return "has 4 bits; use method fp8"
    if scheme.activation is not None:
        return "leaves inputs in 16 bit; use scheme NVFP4A16"
    return None


def quantize(
    weights: Sequence[Tensor],
    scheme: QuantScheme,
    config: Nvfp4Config,
    *,
    scale_dtype: torch.dtype,
    observed: Observed = UNOBSERVED,
) -> list[Outcome]:
    """E2M1 codes for whole layers [N_i, K] that share an input, observed or not, and from
    here on a divisor.

    scale_dtype: not used, scales are E4M3 below an fp32 number. An expert that no token reached is
    as in `rtn.quantize`.
    Raises RecipeError when K is no multiple of 16.
    """
    if weights[0].shape[1] % FP4_GROUP:
        raise RecipeError(
            f"scheme: NVFP4 has groups of {FP4_GROUP} columns, a layer has"
            f" {weights[0].shape[1]}; ignore it or use method fp8"
        )
    hessian, unseen = observed.driven, observed.nothing
    searched = config.scale_search == "importance"
    importance = column_importance(hessian) if searched and hessian is not None else None
    offsets = OFFSETS[:1] if config.scale_search == "minmax" else OFFSETS
    divisor = global_scale(weights)
    outcomes = []
    for weight in weights:
        layer = judge(weight, hessian)
        q = quantize_fp4(layer.weight, scheme, offsets, divisor, importance=importance)
        outcome = Outcome(q, layer.error(q.dequantize()), "nvfp4")
        outcomes.append(replace(outcome, kept=UNSEEN if unseen and searched else None))
    return outcomes
