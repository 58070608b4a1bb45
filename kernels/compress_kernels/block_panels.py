"""llama.cpp's blocks in panels, as products read them."""

import torch
from torch import Tensor

from compress_kernels.blocks.bytes import BlockFields, unpack
from compress_kernels.blocks.layouts import LAYOUTS, BlockLayout
from compress_kernels.panels import (
    PANEL,
    WIDTHS,
    Codes,
    Layout,
    Panels,
    by_panel,
    lay_out,
    panel_bytes,
)


def block_panels(kind: str, data: Tensor, layout: Layout) -> Panels:
    """data: uint8 [N, bytes], rows of blocks of a key of LAYOUTS. Numbers decoded of the panels
    have the bits of ops.super_blocks.decode_blocks."""
    of, rows = LAYOUTS[kind], len(data)
    fields = unpack(of, data.reshape(-1, of.size))
    codes, bits = fields.codes.view(rows, -1), WIDTHS[of.bits]
    codes_are = _codes(of)
    if codes_are == "int":  # the centre is that of fewer bits
        codes = (codes.to(torch.int16) - of.centre).to(torch.int8)
    laid, width = lay_out(codes, bits, layout), codes.shape[1]
    scales, minima, outer, outer_minima = (
        None if x is None else by_panel(x.reshape(rows, -1)) for x in _numbers(of, fields)
    )
    assert scales is not None, "every type has them"
    return Panels(
        laid, scales, None, None, (rows, width), bits, of.sub, layout, torch.float32, codes_are,
        minima=minima, outer_scales=outer, outer_minima=outer_minima,
    )  # fmt: skip


def block_panel_bytes(kind: str, shape: tuple[int, int], layout: Layout) -> int:
    """What the panels of a weight [N, K] take."""
    of, (rows, columns) = LAYOUTS[kind], shape
    subs, blocks = columns // of.sub, columns // of.numbers
    parts = 2 if of.minima else 1
    numbers = parts * (subs + 2 * blocks if "scales" in of.parts else 2 * subs)
    codes = panel_bytes(columns, WIDTHS[of.bits], layout)
    return -(-rows // PANEL) * (codes + PANEL * numbers)


def _codes(of: BlockLayout) -> Codes:
    if of.levels is not None:
        return "iq4"
    return "uint" if of.minima else "int"


def _numbers(of: BlockLayout, fields: BlockFields) -> tuple[Tensor | None, ...]:
    """Scales and minima of sub-blocks, and what both are times in a block. Where blocks have no
    sub-blocks the numbers in fp16 are theirs."""
    if "scales" in of.parts:
        minima = None if fields.minima is None else fields.minima.to(torch.int8)
        return fields.scales.to(torch.int8), minima, fields.d, fields.dmin
    return fields.d, None if fields.dmin is None else -fields.dmin, None, None
