"""Scales as they are stored: which are damaged, and those of another format's dtype."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import QuantizedTensor

# Below NVFP4's global scale a group of tiny weights may have scale 0.
_MAY_BE_ZERO = torch.float8_e4m3fn


def damage(scale: Tensor, scheme: QuantScheme | None) -> tuple[int, str]:
    """How many of the stored scales cannot be meant, and what is wrong with them.

    scheme: that of the weight whose scales they are; None for all other scales. Those of integers
    alone may be negative (AutoRound's are, too).
    """
    values = scale.float()
    finite = torch.isfinite(values)
    if scheme is not None and scheme.type == "int" and scheme.activation is None:
        return int((~finite | (values == 0)).sum()), "0 or not finite"
    least = values >= 0 if scale.dtype == _MAY_BE_ZERO else values > 0
    return int((~(finite & least)).sum()), "not finite and positive"


class ScaleRounding(NamedTuple):
    """What a dtype does to scales. changed: how many of `total` it changes, largest: the largest
    relative change. lost: how many become 0 or infinite."""

    changed: int = 0
    total: int = 0
    largest: float = 0.0
    lost: int = 0

    def plus(self, other: "ScaleRounding") -> "ScaleRounding":
        return ScaleRounding(
            self.changed + other.changed,
            self.total + other.total,
            max(self.largest, other.largest),
            self.lost + other.lost,
        )


def change(scale: Tensor, dtype: torch.dtype) -> ScaleRounding:
    """What rounding `scale` (any shape, any floating dtype) to `dtype` would change."""
    if scale.dtype == dtype:
        return ScaleRounding(total=scale.numel())
    before = scale.double()
    after = scale.to(dtype).double()
    lost = int((~torch.isfinite(after) | ((after == 0) & (before != 0))).sum())
    step = (after - before).abs() / torch.where(before == 0, 1.0, before.abs())
    largest = float(step[torch.isfinite(step)].max()) if bool(torch.isfinite(step).any()) else 0.0
    return ScaleRounding(int((after != before).sum()), scale.numel(), largest, lost)


def why_not_exact(found: ScaleRounding, dtype: torch.dtype, *, round_scales: bool) -> str | None:
    """Why scales cannot be had in `dtype`, None when they can."""
    name = str(dtype).removeprefix("torch.")
    if found.lost:
        return (
            f"{found.lost} of {found.total} scales are too large or too small for {name}; take a"
            " format that keeps their dtype, such as compressed-tensors"
        )
    if found.changed and not round_scales:
        return (
            f"{found.changed} of {found.total} scales are not exact in {name} (the largest changes"
            f" by {found.largest:.2g} of its value); add --round-scales to round them, or take a"
            " format that keeps their dtype, such as compressed-tensors"
        )
    return None


def fit_scales(
    tensor: QuantizedTensor, dtype: torch.dtype, *, round_scales: bool
) -> QuantizedTensor:
    """The same codes with scales, and a static input scale, in `dtype`.

    NVFP4's scales stay E4M3. RecipeError unless the values stay what they are, or round_scales is
    given and none is lost.
    """
    scale, inputs = tensor.scale, tensor.input_scale
    found = ScaleRounding() if tensor.scheme.is_fp4 else change(scale, dtype)
    if inputs is not None:
        found = found.plus(change(inputs, dtype))
    if (reason := why_not_exact(found, dtype, round_scales=round_scales)) is not None:
        raise RecipeError(reason)
    return replace(
        tensor,
        scale=scale if tensor.scheme.is_fp4 else scale.to(dtype),
        input_scale=None if inputs is None else inputs.to(dtype),
    )
