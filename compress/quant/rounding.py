"""Round to nearest on a uniform grid, and the ranges a scale search tries.

Symmetric scales map amax to (2^bits - 1) / 2 steps, as compressed-tensors does (4 bit: amax / 7.5);
a candidate range is that scale times a ratio. Scales are rounded to their storage dtype before any
code is chosen, so what is written is what was optimised.

Symmetric codes reach one step further below zero than above. A negative scale turns that side to
where the larger weights are: AutoRound's "full range" grid, the default of its int4 checkpoints.
Not every runtime takes such scales, so a recipe may keep them positive (`Signs`).
"""

from typing import Literal

import torch
from torch import Tensor

from compress.quant.scheme import QuantScheme, Signs
from compress.quant.tensor import QuantizedTensor
from compress_kernels import group_scale

CANDIDATES = 40
# Narrowest range worth trying, as a share of amax: a normal weight in a row of 4096 has its
# optimum at 0.37 (2 bit), 0.65 (4 bit) and 0.95 (8 bit); each bound leaves room below that.
NARROWEST = {2: 0.25, 3: 0.4, 4: 0.5, 5: 0.6, 6: 0.7, 7: 0.75, 8: 0.8}


def clip_ratios(
    search: Literal["minmax", "mse", "importance"], scheme: QuantScheme, signs: Signs = "auto"
) -> Tensor:
    """Ratios to the full range that a scale search tries: fp32 [candidates], widest first, then as
    many negative ones where scales may be negative. Signs "positive" leaves those out."""
    if search == "minmax":
        return torch.ones(1)
    turned = may_be_negative(scheme)
    # The widest range puts amax on the last positive code, not half a step past it.
    unclipped = (2**scheme.bits - 1) / (2**scheme.bits - 2)
    count = CANDIDATES // 2 if turned else CANDIDATES
    ratios = torch.linspace(unclipped, NARROWEST[scheme.bits], count)
    # Others in their place would be worth 0.3 % of the squared error (tale-6m, 3 and 4 bits).
    return torch.cat([ratios, -ratios]) if turned and signs != "positive" else ratios


def may_be_negative(scheme: QuantScheme) -> bool:
    """Whether a search may choose negative scales.

    Not under integer activations: vLLM's Marlin kernel for them reads scales as unsigned (its
    issue 48905). Not with 8 bits, where one step more is worth nothing.
    """
    return scheme.symmetric and scheme.activation is None and scheme.bits < 8


def round_to_nearest(
    weight: Tensor,
    scheme: QuantScheme,
    ratios: Tensor,
    *,
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
) -> QuantizedTensor:
    """Nearest codes of weight [N, K] under the best scale of `ratios` for every group.

    importance: fp32 [K], weight of each column's squared error in the choice; None for equal.
    """
    scale, zero = choose_scales(weight, scheme, ratios, scale_dtype, importance)
    return encode(weight, scheme, scale, zero)


def choose_scales(
    weight: Tensor,
    scheme: QuantScheme,
    ratios: Tensor,
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scales ([N, G], [1, 1] for "tensor") in `scale_dtype` and int8 zeros of the same shape."""
    w = weight.float()  # w: [N, K]
    if scheme.granularity == "tensor":
        if importance is not None:
            importance = importance.expand_as(w).reshape(-1)
        w = w.reshape(1, -1)
    k = w.shape[1]
    step = k if scheme.granularity == "tensor" else scheme.columns_per_scale(k)
    pieces = [
        group_scale(
            w[:, start : start + step],
            ratios,
            None if importance is None else importance[start : start + step],
            scheme.bits,
            scheme.symmetric,
            scale_dtype,
        )
        for start in range(0, k, step)
    ]
    scale = torch.stack([scale for scale, _ in pieces], dim=1).to(scale_dtype)
    if scheme.symmetric:
        return scale, None
    return scale, torch.stack([zero for _, zero in pieces if zero is not None], dim=1)


def encode(
    weight: Tensor,
    scheme: QuantScheme,
    scale: Tensor,
    zero: Tensor | None,
    g_idx: Tensor | None = None,
) -> QuantizedTensor:
    """Nearest codes of weight [N, K] for given scales, ties to even."""
    k = weight.shape[1]
    step = scheme.columns_per_scale(k)
    groups = torch.arange(k) // step if g_idx is None else g_idx.long()
    codes = weight.float() / scale.float()[:, groups]
    codes.round_()
    if zero is not None:
        codes += zero.float()[:, groups]
    codes.clamp_(scheme.code_min, scheme.code_max)
    return QuantizedTensor(codes.to(torch.int8), scale, zero, g_idx, scheme)
