"""Weights as llama.cpp's blocks hold them: decoded, rounded, and settled code by code where scales
are there, by GPTQ's column loop (arXiv 2210.17323, Algorithm 1)."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from compress_kernels.blocks.bytes import BlockFields, pack, unpack
from compress_kernels.blocks.layouts import BlockLayout
from compress_kernels.blocks.scales import find_scales, inverse_of
from compress_kernels.blocks.search import BlockSearch


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


def nearest_levels(layout: BlockLayout, y: Tensor) -> Tensor:
    """Of each number, of whole ones ties to even: fp32, the shape of y."""
    table = level_values(layout, y.device)
    if layout.levels is None:
        return y.clamp(float(table[0]), float(table[-1])).round()
    return table[torch.bucketize(y, (table[1:] + table[:-1]) / 2)]


def codes_of(layout: BlockLayout, levels: Tensor) -> Tensor:
    """uint8, the shape of the levels."""
    return torch.searchsorted(level_values(layout, levels.device), levels).to(torch.uint8)


def round_blocks(
    layout: BlockLayout, weight: Tensor, importance: Tensor, search: BlockSearch
) -> Tensor:
    """fp32 [N, K] -> uint8 [N, bytes], as ops.super_blocks.round_blocks says. importance: [K]."""
    x = weight.reshape(-1, layout.subs, layout.sub)
    w = importance.expand_as(weight).reshape(x.shape)
    levels = partial(nearest_levels, layout)
    found = find_scales(layout, levels, x, w, search)
    step, offset = (part[..., None] for part in found.grid())
    codes = codes_of(layout, levels((x + offset) * inverse_of(step))).flatten(1)
    d, scale, minimum = found.d.to(torch.float16), found.scale, found.minimum
    fields = BlockFields(codes, d, scale.to(torch.int16), None, None)
    if layout.minima:
        sign = -1 if layout.minima == 1 else 1  # the minimum of a block alone is -1
        dmin = (sign * found.dmin).to(torch.float16)
        fields = replace(fields, dmin=dmin, minima=(sign * minimum).to(torch.int16))
    return pack(layout, fields).reshape(len(weight), -1)


def settle_blocks(
    layout: BlockLayout, weight: Tensor, data: Tensor, factor: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    """Blocks with other codes, uint8 [N, bytes], and weight less what they hold, fp32 [N, K]: both
    as ops.super_blocks.settle_blocks says."""
    rows, width = weight.shape
    fields = unpack(layout, data.reshape(-1, layout.size))
    step, offset = (None if x is None else x.reshape(rows, -1) for x in steps(fields))
    assert step is not None
    codes = torch.empty(rows, width, dtype=torch.uint8, device=weight.device)
    lost, pull = torch.empty_like(weight), torch.zeros_like(weight)
    for i, at in enumerate(order.tolist()):
        sub = at // layout.sub
        s, o = step[:, sub], None if offset is None else offset[:, sub]
        updated = weight[:, i] + pull[:, i] * (1.0 / factor[i, i])
        level = nearest_levels(layout, (updated if o is None else updated + o) * inverse_of(s))
        value = s * level
        lost[:, i] = weight[:, i] - (value if o is None else value - o)
        pull[:, i + 1 :] += lost[:, i, None] * factor[i, i + 1 :]
        codes[:, at] = codes_of(layout, level)
    settled = replace(fields, codes=codes.reshape(-1, layout.numbers))
    return pack(layout, settled).reshape(rows, -1), lost
