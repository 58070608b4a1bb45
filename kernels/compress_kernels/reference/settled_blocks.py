"""GPTQ's column loop (arXiv 2210.17323, Algorithm 1) within blocks whose scales are there."""

from dataclasses import replace

import torch
from torch import Tensor

from compress_kernels.reference.block_bytes import pack, unpack
from compress_kernels.reference.block_search import inverse_of
from compress_kernels.reference.super_blocks import codes_of, nearest_levels, steps
from compress_kernels.super_blocks import BlockLayout


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
