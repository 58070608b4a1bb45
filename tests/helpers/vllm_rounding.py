"""How vLLM on CPU rounds inputs and caches where that is not transformers' way."""

import torch
from torch import Tensor

from compress.quant.activations import fake_quantize
from compress.quant.scheme import ActivationScheme
from compress.quant.tensor import InputQuantization


def is_int8_a_token(scheme: ActivationScheme) -> bool:
    return scheme.type == "int" and scheme.dynamic and scheme.granularity == "token"


def rounded_inputs(x: Tensor, how: InputQuantization) -> Tensor:
    """The largest 8-bit integer input of a token on 127."""
    if not is_int8_a_token(how.scheme):
        return fake_quantize(x, how)
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def rounded_cache(x: Tensor, how: InputQuantization) -> Tensor:
    """To E4M3, toward zero."""
    assert how.scale is not None
    scale = how.scale.to(x.dtype)
    wanted = (x / scale).clamp(-448, 448)
    nearest = wanted.abs().to(torch.float8_e4m3fn)
    below = nearest.view(torch.uint8) - (nearest.to(x.dtype) > wanted.abs()).to(torch.uint8)
    return below.view(torch.float8_e4m3fn).to(x.dtype) * wanted.sign() * scale
