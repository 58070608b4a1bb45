"""Weights as llama.cpp's blocks hold them: decoded, and rounded plainly."""

import torch
from torch import Tensor

from compress_kernels.reference.block_bytes import BlockFields, pack, unpack
from compress_kernels.super_blocks import BlockLayout


def decode_blocks(layout: BlockLayout, data: Tensor) -> Tensor:
    """uint8 [N, bytes] -> fp32 [N, K], to the bit what ggml gives."""
    fields = unpack(layout, data.reshape(-1, layout.size))
    return values(layout, fields).reshape(len(data), -1)


def values(layout: BlockLayout, fields: BlockFields) -> Tensor:
    """fp32 [M, subs, sub]."""
    step, offset = steps(fields)
    levels = level_values(layout, fields.codes.device)[fields.codes.long()]
    found = step[..., None] * levels.view(*step.shape, layout.sub)
    return found if offset is None else found - offset[..., None]


def steps(fields: BlockFields) -> tuple[Tensor, Tensor | None]:
    """What a level is worth in each sub-block, and what is taken away: fp32 [M, subs]."""
    step = fields.d.float()[:, None] * fields.scales.float()
    if fields.dmin is None or fields.minima is None:
        return step, None
    return step, fields.dmin.float()[:, None] * fields.minima.float()


def level_values(layout: BlockLayout, device: torch.device) -> Tensor:
    """Of every code: fp32 [2 ** bits]."""
    if layout.levels is not None:
        return torch.tensor(layout.levels, dtype=torch.float32, device=device)
    return torch.arange(1 << layout.bits, dtype=torch.float32, device=device) - layout.centre


def nearest_codes(layout: BlockLayout, x: Tensor, step: Tensor, offset: Tensor | None) -> Tensor:
    """x: fp32 [M, subs, sub] -> uint8, the same shape; the centre where a step is 0."""
    shifted = x if offset is None else x + offset[..., None]
    level = shifted * torch.where(step == 0, 0.0, 1.0 / step)[..., None]
    if layout.levels is not None:
        table = level_values(layout, x.device)
        return torch.bucketize(level, (table[1:] + table[:-1]) / 2).to(torch.uint8)
    top = (1 << layout.bits) - 1
    return (level.round() + layout.centre).clamp(0, top).to(torch.uint8)


def round_blocks(layout: BlockLayout, weight: Tensor, importance: Tensor | None) -> Tensor:
    """fp32 [N, K] -> uint8 [N, bytes]."""
    x = weight.reshape(-1, layout.subs, layout.sub)
    low, high = x.amin(2).clamp(max=0), x.amax(2).clamp(min=0)
    levels = level_values(layout, x.device)
    dmin = minima = None
    if layout.minima:
        step = (high - low) / (len(levels) - 1)
        dmin, minima = _split(-low, (-1, -1) if layout.minima == 1 else (0, layout.minima))
    else:
        largest = torch.where(high > -low, high, low)
        step = largest / levels[0]
    d, scales = _split(step, layout.scale_range)
    empty = torch.zeros(x.shape[0], x.shape[1] * x.shape[2], dtype=torch.uint8, device=x.device)
    fields = BlockFields(empty, d, scales, dmin, minima)
    codes = nearest_codes(layout, x, *steps(fields)).flatten(1)
    return pack(layout, BlockFields(codes, d, scales, dmin, minima)).reshape(len(weight), -1)


def _split(wanted: Tensor, allowed: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """fp32 [M, subs] as a factor of the block, fp16 [M], times whole numbers, int16 [M, subs]."""
    low, high = allowed
    most = wanted.gather(1, wanted.abs().argmax(1, keepdim=True))[:, 0]
    unit = high if low >= 0 else low
    d = (most / unit).clamp(-65504, 65504).to(torch.float16)
    inverse = torch.where(d == 0, 0.0, 1.0 / d.float())[:, None]
    whole = (wanted * inverse).round().clamp(low, high)
    return d, whole.to(torch.int16)
