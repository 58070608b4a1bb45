"""Scales of inputs that calibration fixes."""

import torch
from torch import Tensor

from compress.quant.scheme import ActivationScheme

E4M3_MAX = 448.0


def static_scale(absmax: Tensor, scheme: ActivationScheme, dtype: torch.dtype) -> Tensor:
    """The one scale of a static scheme: [1] in `dtype`, in which it is stored.

    absmax: [K], largest magnitude seen in every input column. The largest lands on the end of the
    range, as in compressed-tensors (8 bit: amax / 127.5; E4M3: amax / 448); 1 where all were 0, and
    where the scale is too small for `dtype`.
    """
    assert not scheme.dynamic, "a dynamic scheme has no scale to store"
    largest = E4M3_MAX if scheme.type == "float" else ((1 << scheme.bits) - 1) / 2
    scale = (absmax.amax().float() / largest).to(dtype).reshape(1)
    return torch.where(scale == 0, torch.ones_like(scale), scale)
