"""Codes of a weight in panels of 16 outputs, each one stream of bytes: how products read them.

Two layouts, since a layout that suits one product makes the other slow:

"dots": [panel, step of columns, output, 4 bytes], for sums of whole numbers. Of each output 4 bytes
hold the codes of 4, 8 or 16 columns: byte b has those of columns b, 4 + b, 8 + b and so on, the
first in its lowest bits.

"rows": [panel, chunk of 512 / bits columns, output, lane of 16, 4 bytes], for decoded numbers. Of
each lane 4 bytes are a little-endian number, whose j-th code is that of column 16 j + lane.

Both are permutations: `codes_of` brings the codes back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

Layout = Literal["dots", "rows"]
# What products may change of the decoded weight's numbers and of their inputs: nothing, or they
# round inputs to so many bits.
Math = Literal["exact", "int16", "int8"]
PANEL = 16  # outputs
RUN = 128  # columns that are summed as whole numbers, at most


@dataclass(frozen=True, slots=True, eq=False)
class Panels:
    """A weight [N, K] of whole codes; it is (code - zero) * scale.

    codes: uint8 in the layout, each code plus 2^(bits - 1); outputs and columns that only fill up
    are 0. bits: 2, 4 or 8. scales: [panels, G, 16], fp32, bf16 or fp16. zeros: int8, as the scales,
    None for 0. columns: int32 [K], of each place the column of the weight; None where they are the
    same. group: columns, in their places, that share a scale. plain: the dtype that decoded numbers
    are rounded to.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    columns: Tensor | None
    shape: tuple[int, int]
    bits: int
    group: int
    layout: Layout
    plain: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.columns)
        return sum(part.nbytes for part in parts if part is not None)

    def rows(self, start: int, stop: int) -> "Panels":
        """The panels that have the outputs from `start`, a multiple of 16, to `stop`."""
        cut = slice(start // PANEL, -(-stop // PANEL))
        return replace(
            self,
            codes=self.codes[cut],
            scales=self.scales[cut],
            zeros=None if self.zeros is None else self.zeros[cut],
            shape=(stop - start, self.shape[1]),
        )


def places(columns: int, bits: int, layout: Layout) -> int:
    """Columns with those that only fill up."""
    step = 16 if layout == "dots" else 512 // bits
    return -(-columns // step) * step


def panel_bytes(columns: int, bits: int, layout: Layout) -> int:
    """Of the codes of 16 outputs."""
    return places(columns, bits, layout) * PANEL * bits // 8


def lay_out(codes: Tensor, bits: int, layout: Layout) -> Tensor:
    """Codes, int8 [N, K], in the layout; `bits` may be more than they need."""
    n, k = codes.shape
    unsigned = (codes.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    filled = pad(unsigned, (0, places(k, bits, layout) - k, 0, -n % PANEL))
    each = 8 // bits
    if layout == "dots":
        # [panel, output, step, code of a byte, byte]
        parts = filled.view(-1, PANEL, filled.shape[1] // (4 * each), each, 4)
        return _joined(parts, 3, bits).transpose(1, 2).contiguous()
    # [panel, output, chunk, byte, code of a byte, lane]
    parts = filled.view(-1, PANEL, filled.shape[1] * bits // 512, 4, each, 16)
    return _joined(parts, 4, bits).permute(0, 2, 1, 4, 3).contiguous()


def codes_of(panels: Panels) -> Tensor:
    """Codes, int8 [N, K], each column in its own place again."""
    n, k = panels.shape
    if panels.layout == "dots":
        parts = _apart(panels.codes.transpose(1, 2), 3, panels.bits)
    else:
        parts = _apart(panels.codes.permute(0, 2, 1, 4, 3), 4, panels.bits)
    unsigned = parts.reshape(-1, places(k, panels.bits, panels.layout))[:n, :k]
    codes = (unsigned.to(torch.int16) - (1 << (panels.bits - 1))).to(torch.int8)
    return codes if panels.columns is None else _in_place(codes, panels.columns)


def joined(parts: Sequence[Panels]) -> Panels:
    """The outputs of all, one behind the other. Only their outputs and numbers may differ."""
    first, columns = parts[0], parts[0].columns
    outputs = sum(part.shape[0] for part in parts)
    if all(part.shape[0] % PANEL == 0 for part in parts[:-1]):  # nothing lies between them
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return replace(
            first,
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            zeros=torch.cat(zeros) if zeros else None,
            shape=(outputs, first.shape[1]),
        )
    codes = torch.cat([codes_of(part) for part in parts])
    zeros = [by_output(part.zeros, part.shape[0]) for part in parts if part.zeros is not None]
    scales = torch.cat([by_output(part.scales, part.shape[0]) for part in parts])
    placed = codes if columns is None else codes[:, columns.long()]
    return replace(
        first,
        codes=lay_out(placed, first.bits, first.layout),
        scales=by_panel(scales),
        zeros=by_panel(torch.cat(zeros)) if zeros else None,
        shape=(outputs, first.shape[1]),
    )


def by_panel(numbers: Tensor) -> Tensor:
    """[N, G] -> [panels, G, 16]; outputs that only fill up have 0."""
    filled = pad(numbers, (0, 0, 0, -numbers.shape[0] % PANEL))
    return filled.view(-1, PANEL, numbers.shape[1]).transpose(1, 2).contiguous()


def by_output(numbers: Tensor, outputs: int) -> Tensor:
    """[panels, G, 16] -> [N, G]."""
    return numbers.transpose(1, 2).reshape(-1, numbers.shape[1])[:outputs]


def decoded(panels: Panels) -> Tensor:
    """fp32 [N, K]: (code - zero) * scale, rounded once to panels.plain."""
    n, k = panels.shape
    groups = torch.arange(k) // panels.group
    if panels.columns is not None:
        groups = _in_place(groups[None], panels.columns)[0]
    values = codes_of(panels).float()
    if panels.zeros is not None:
        values -= by_output(panels.zeros, n).float()[:, groups]
    values *= by_output(panels.scales, n).float()[:, groups]
    return values.to(panels.plain).float()


def _joined(codes: Tensor, dim: int, bits: int) -> Tensor:
    """Codes along a dimension in one byte."""
    first, *others = codes.unbind(dim)
    for place, other in enumerate(others, 1):
        first = first | (other << (bits * place))
    return first


def _apart(joined: Tensor, dim: int, bits: int) -> Tensor:
    mask = (1 << bits) - 1
    return torch.stack([(joined >> shift) & mask for shift in range(0, 8, bits)], dim)


def _in_place(numbers: Tensor, columns: Tensor) -> Tensor:
    """[N, K] with the columns where they belong."""
    found = torch.empty_like(numbers)
    found[:, columns.long()] = numbers
    return found
