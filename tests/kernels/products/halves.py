"""Products of rows in bf16 with codes, held to those with the decoded weight."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from compress_kernels.ops.linear import linear
from compress_kernels.ops.packed import packed_linear
from compress_kernels.panels import Panels, codes_of, decoded, lay_out


def in_dots(panels: Panels) -> Panels:
    """The same weight, laid out as rows in bf16 read it."""
    codes = codes_of(panels)
    placed = codes if panels.columns is None else codes[:, panels.columns.long()]
    return replace(panels, codes=lay_out(placed, panels.bits, "dots"), layout="dots")


def check_halves(panels: Panels, x: Tensor, bias: Tensor, rows: Iterable[int]) -> None:
    """Bit for bit; of the first rows of x, so many at once. NaN is NaN."""
    laid = in_dots(panels)
    halves, shift = x.bfloat16(), bias.bfloat16()
    wanted = linear(halves, decoded(panels).bfloat16(), shift)
    for m in rows:
        found = packed_linear(halves[:m], laid, shift, "exact")
        assert torch.equal(found.isnan(), wanted[:m].isnan()), m
        assert torch.equal(found.nan_to_num(7), wanted[:m].nan_to_num(7)), m
