"""Integer activations, simulated: what a runtime with int8 GEMMs does to the inputs of a linear.

Scale and rounding are those of compressed-tensors' dynamic per-token strategy, in the dtype of the
input, so that both give the same logits.
"""

from typing import Any

import torch
from torch import Tensor, nn

from compress.quant.scheme import ActivationScheme
from compress.quant.tensor import InputQuantization


def fake_quantize(x: Tensor, scheme: ActivationScheme) -> Tensor:
    """Round every token to `scheme.bits` symmetric integers and back. x: [..., K], same dtype."""
    low, high = -(1 << (scheme.bits - 1)), (1 << (scheme.bits - 1)) - 1
    scale = x.abs().amax(-1, keepdim=True) / ((high - low) / 2)
    scale = torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)
    return torch.clamp(x / scale, low, high).round() * scale


def quantize_inputs(module: nn.Module, inputs_as: InputQuantization) -> None:
    """Make a linear see its inputs through `fake_quantize` from now on."""

    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (fake_quantize(inputs[0], inputs_as.scheme), *inputs[1:])

    module.register_forward_pre_hook(hook)
