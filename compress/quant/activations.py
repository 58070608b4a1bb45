"""Quantized inputs, simulated: what a runtime with 8-bit products does to the inputs of a linear.

Scale and rounding are those of compressed-tensors, in the dtype of the input, so that both give the
same logits: the largest magnitude lands on 127.5 (codes -128 to 127) or on 448 (E4M3). Inputs of
more dimensions than two are tokens in all but the last. LLM.int8() is bitsandbytes': the largest
magnitude lands on 127, and columns with an outlier stay as they are.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from compress.quant.floats import E4M3_MAX
from compress.quant.scheme import ActivationScheme
from compress.quant.tensor import InputQuantization

LLM_INT8_MAX = 127.0  # code of the largest magnitude


def rounds_together(scheme: ActivationScheme) -> bool:
    whole = scheme.dynamic and scheme.granularity == "tensor" and scheme.outliers == "none"
    return whole or scheme.outliers == "dynamic"


def quantize_inputs(module: nn.Module, inputs_as: InputQuantization) -> None:
    """Make a linear see its inputs through `fake_quantize` from now on."""

    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (fake_quantize(inputs[0], inputs_as), *inputs[1:])

    module.register_forward_pre_hook(hook)


def fake_quantize(x: Tensor, inputs_as: InputQuantization, *, alone: bool = False) -> Tensor:
    """Inputs as the linear's product sees them. x: [..., K], same dtype.

    Tokens that are quantized together (a scale for the tensor, outliers of a call) are all those
    of x, or with `alone` each token by itself, as if it were the only one of its call.
    """
    if x.numel() == 0:
        return x
    if inputs_as.factor is not None:  # the columns of the dequantized weight have it already
        factor = inputs_as.factor.to(x.device, x.dtype)
        return fake_quantize(x * factor, replace(inputs_as, factor=None), alone=alone) / factor
    scheme = inputs_as.scheme
    if scheme.outliers == "dynamic":
        return _dynamic_outliers(x, scheme.threshold, alone)
    if scheme.outliers == "calibrated":
        assert inputs_as.columns is not None, "calibrated outliers have columns"
        return _calibrated_outliers(x, inputs_as.columns)
    if not scheme.dynamic:
        assert inputs_as.scale is not None, "a static scheme has a scale"
        return _round(x, inputs_as.scale.to(x.device, x.dtype), scheme)
    if scheme.granularity == "tensor" and not alone:
        return _round(x, _scale(x.abs().amax(), scheme), scheme)
    if scheme.granularity in ("token", "tensor"):
        return _round(x, _scale(x.abs().amax(-1, keepdim=True), scheme), scheme)
    groups = _in_groups(x, scheme.group_size)
    rounded = _round(groups, _scale(groups.abs().amax(-1, keepdim=True), scheme), scheme)
    return rounded.flatten(-2)[..., : x.shape[-1]]


def _scale(largest: Tensor, scheme: ActivationScheme) -> Tensor:
    """Scales for largest magnitudes, in their dtype; the dtype's epsilon for zeros."""
    steps = E4M3_MAX if scheme.type == "float" else ((1 << scheme.bits) - 1) / 2
    scale = largest / steps
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def _round(x: Tensor, scale: Tensor, scheme: ActivationScheme) -> Tensor:
    """x to codes of the scheme and back."""
    if scheme.type == "float":
        codes = (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)
    else:
        half = 1 << (scheme.bits - 1)
        codes = (x / scale).clamp(-half, half - 1).round()
    return codes * scale


def _in_groups(x: Tensor, size: int) -> Tensor:
    """[..., K] -> [..., G, size], the last group filled with zeros."""
    missing = -x.shape[-1] % size
    padded = pad(x, (0, missing)) if missing else x
    return padded.reshape(*x.shape[:-1], -1, size)


def _dynamic_outliers(x: Tensor, threshold: float, alone: bool) -> Tensor:
    """bitsandbytes' rule: a column with one outlier among all tokens stays as it is; a token's
    scale covers all its values that are no outliers, also those in such columns; all of this is
    decided in fp16."""
    seen = x.to(torch.float16)
    outliers = seen.abs() >= threshold
    kept = outliers if alone else outliers.flatten(0, -2).any(dim=0)  # [..., K] or [K]
    return torch.where(kept, x, _absmax_int8(seen.float().masked_fill(outliers, 0)).to(x.dtype))


def _calibrated_outliers(x: Tensor, columns: Tensor) -> Tensor:
    """Fixed columns stay as they are; a token's scale covers all others."""
    kept = torch.zeros(x.shape[-1], dtype=torch.bool, device=x.device)
    kept[columns.to(x.device)] = True
    return torch.where(kept, x, _absmax_int8(x.float().masked_fill(kept, 0)).to(x.dtype))


def _absmax_int8(x: Tensor) -> Tensor:
    """Tokens [..., K], fp32, to int8 codes round(x · 127 / absmax) and back."""
    largest = x.abs().amax(-1, keepdim=True)
    largest = torch.where(largest == 0, 1.0, largest)
    return (x * (LLM_INT8_MAX / largest)).round_() * (largest / LLM_INT8_MAX)
