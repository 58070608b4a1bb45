"""Keys or values of a step into blocks, in plain torch."""

import torch
from torch import Tensor

CODE_MAX = 127.0
SCALE_MAX = 65504.0  # of fp16


def store_states(source: Tensor, target: Tensor, slots: Tensor, scales: Tensor | None) -> None:
    """As states.store_states, arguments checked."""
    size = target.shape[2]
    blocks, offsets = slots // size, slots % size
    if scales is None:
        target[blocks, :, offsets] = source.to(target.dtype)
        return
    wide = source.float()
    steps = (wide.abs().amax(-1) / CODE_MAX).clamp(max=SCALE_MAX).to(torch.float16)
    unit = torch.where(steps == 0, 1.0, steps.float())[..., None]
    codes = (wide / unit).round().clamp(-CODE_MAX, CODE_MAX)
    target[blocks, :, offsets] = codes.nan_to_num(0.0).to(torch.int8)
    scales[blocks, :, offsets] = steps
