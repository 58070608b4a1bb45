"""Codes of a weight in panels of 16 outputs, each one stream of bytes: how products read them.

Two layouts, since a layout that suits one product makes the other slow:

"dots": [panel, step of columns, output, 4 bytes], for sums of an output a lane, of whole numbers or
of pairs in bf16. Of each output 4 bytes hold the codes of 4, 8 or 16 columns: byte b has those of
columns b, 4 + b, 8 + b and so on, the first in its lowest bits.

"rows": [panel, chunk of 512 / bits columns, output, lane of 16, 4 bytes], for sums of a column a
lane, of numbers decoded to fp32. Of each lane 4 bytes are a little-endian number, whose j-th code
is that of column 16 j + lane.

Both are permutations: `codes_of` brings the codes back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from compress_kernels.blocks.layouts import IQ4_LEVELS

Layout = Literal["dots", "rows"]
# What codes are: whole numbers plus 2^(bits - 1), whole numbers from 0 on, or floats: of 4 bits
# sign << 3 | magnitude (0, 0.5, 1, 1.5, 2, 3, 4 and 6), of 8 bits E4M3 numbers as they are stored,
# of which none is NaN; or places in IQ4_LEVELS.
Codes = Literal["int", "uint", "e2m1", "e4m3", "iq4"]
# What products may change of the decoded weight's numbers and of their inputs: nothing, or they
# round inputs to so many bits.
Math = Literal["exact", "int16", "int8"]
PANEL = 16  # outputs
# Bits that a code of so many takes.
WIDTHS = {2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}
RUN = 128  # columns that are summed as whole numbers, at most
_E4M3 = torch.float8_e4m3fn
# The bytes of E2M1's magnitudes in E4M3.
_MAGNITUDES = (0x00, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C)


@dataclass(frozen=True, slots=True, eq=False)
class OwnColumns:
    """Columns whose numbers stand in for their codes. columns: int32 [n]. numbers: bf16 [N, n]."""

    columns: Tensor
    numbers: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Panels:
    """A weight [N, K] of codes; it is (code - zero) * (scale / divisor * factor) - minimum.

    codes: uint8 in the layout, of the kind that `kind` says; outputs and columns that only fill up
    are 0. bits: 2, 4 or 8, where those of "uint" are below 32. scales: [panels, G, 16], or
    [panels, G, 1] where outputs of a panel share them; fp32, bf16, fp16, E4M3 or int8. zeros: int8
    [panels, G, 16], None for 0. columns: int32 [K], of each place the column of the weight; None
    where they are the same. group: columns, in their places, that share a scale. plain: the dtype
    that decoded numbers are rounded to. divisor, factor: numbers of fp32. minima: fp16 or int8
    [panels, G, 16], of "uint" alone, None for 0. outer_scales, outer_minima: fp16
    [panels, G / each, 16], what `each` neighbouring groups' scales and minima are multiplied by, or
    None. own: of rows in bf16 alone.
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
    kind: Codes = "int"
    divisor: float = 1.0
    factor: float = 1.0
    minima: Tensor | None = None
    outer_scales: Tensor | None = None
    outer_minima: Tensor | None = None
    own: OwnColumns | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is kept."""
        own = () if self.own is None else (self.own.columns, self.own.numbers)
        parts = (self.codes, self.columns, *own, *(getattr(self, name) for name in NUMBERS))
        return tuple(part for part in parts if part is not None)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.tensors)

    @property
    def each(self) -> int:
        """Groups that share outer numbers."""
        return (
            1 if self.outer_scales is None else self.scales.shape[1] // self.outer_scales.shape[1]
        )

    def rows(self, start: int, stop: int) -> "Panels":
        """The panels that have the outputs from `start`, a multiple of 16, to `stop`."""
        cut, own = slice(start // PANEL, -(-stop // PANEL)), _numbers([self])
        numbers: Any = {name: of[0][cut] for name, of in own.items()}
        shape, kept = (stop - start, self.shape[1]), self.own
        if kept is not None:
            kept = OwnColumns(kept.columns, kept.numbers[start:stop])
        return replace(self, codes=self.codes[cut], shape=shape, own=kept, **numbers)


# The fields that have a number for each output.
NUMBERS = ("scales", "zeros", "minima", "outer_scales", "outer_minima")


def places(columns: int, bits: int, layout: Layout) -> int:
    """Columns with those that only fill up."""
    step = 16 if layout == "dots" else 512 // bits
    return -(-columns // step) * step


def panel_bytes(columns: int, bits: int, layout: Layout) -> int:
    """Of the codes of 16 outputs."""
    return places(columns, bits, layout) * PANEL * bits // 8


def lay_out(codes: Tensor, bits: int, layout: Layout) -> Tensor:
    """Codes, int8, uint8 or float8_e4m3fn [N, K], in the layout; `bits` may be more than whole ones
    need. Floats of 4 bits are E2M1 numbers; uint8 are stored as they are."""
    return _arranged(_unsigned(codes, bits), bits, layout)


def codes_of(panels: Panels) -> Tensor:
    """Codes, int8, uint8 or float8_e4m3fn [N, K], each column in its own place again."""
    return _signed(_by_column(panels), panels)


def joined(parts: Sequence[Panels]) -> Panels:
    """The outputs of all, one behind the other. Only their outputs and numbers may differ, and none
    has columns of its own."""
    first, columns = parts[0], parts[0].columns
    shape = sum(part.shape[0] for part in parts), first.shape[1]
    numbers = _numbers(parts)
    if all(part.shape[0] % PANEL == 0 for part in parts[:-1]):  # nothing lies between them
        whole: Any = {name: torch.cat(of) for name, of in numbers.items()}
        codes = torch.cat([part.codes for part in parts])
        return replace(first, codes=codes, shape=shape, **whole)
    sizes = [part.shape[0] for part in parts]
    whole = {
        name: by_panel(torch.cat([by_output(x, n) for x, n in zip(of, sizes, strict=True)]))
        for name, of in numbers.items()
    }
    codes = torch.cat([_by_column(part) for part in parts])
    placed = codes if columns is None else codes[:, columns.long()]
    laid = _arranged(placed, first.bits, first.layout)
    return replace(first, codes=laid, shape=shape, **whole)


def _numbers(parts: Sequence[Panels]) -> dict[str, list[Tensor]]:
    """By field the numbers of each, where there are any."""
    fields = {name: [getattr(part, name) for part in parts] for name in NUMBERS}
    return {name: of for name, of in fields.items() if of[0] is not None}


def by_panel(numbers: Tensor) -> Tensor:
    """[N, G] -> [panels, G, 16]; outputs that only fill up have 0."""
    if numbers.dtype == _E4M3:
        return by_panel(numbers.view(torch.uint8)).view(_E4M3)
    filled = pad(numbers, (0, 0, 0, -numbers.shape[0] % PANEL))
    return filled.view(-1, PANEL, numbers.shape[1]).transpose(1, 2).contiguous()


def by_output(numbers: Tensor, outputs: int) -> Tensor:
    """[panels, G, 16] or [panels, G, 1] -> [N, G]."""
    panels, groups, _ = numbers.shape
    each = numbers.expand(panels, groups, PANEL)
    return each.transpose(1, 2).reshape(-1, groups)[:outputs]


def steps(panels: Panels) -> Tensor:
    """What a code is worth: fp32 [N, G]."""
    found = _times(panels.scales, panels.outer_scales, panels)
    return found / panels.divisor * panels.factor


def taken_away(panels: Panels) -> Tensor | None:
    """The minimum of each group: fp32 [N, G]."""
    minima = panels.minima
    return None if minima is None else _times(minima, panels.outer_minima, panels)


def levels_of(panels: Panels) -> Tensor:
    """What codes are as numbers, without their zeros: fp32 [N, K]."""
    codes = codes_of(panels)
    if panels.kind == "iq4":
        return torch.tensor(IQ4_LEVELS, dtype=torch.float32)[codes.int()]
    return codes.float()


def decoded(panels: Panels) -> Tensor:
    """fp32 [N, K]: (code - zero) * step - minimum, rounded once to panels.plain; or a column's own
    numbers."""
    n, k = panels.shape
    groups = torch.arange(k) // panels.group
    if panels.columns is not None:
        groups = _in_place(groups[None], panels.columns)[0]
    values, minima = levels_of(panels), taken_away(panels)
    if panels.zeros is not None:
        values -= by_output(panels.zeros, n).float()[:, groups]
    values *= steps(panels)[:, groups]
    if minima is not None:
        values -= minima[:, groups]
    values = values.to(panels.plain).float()
    if panels.own is not None:
        values[:, panels.own.columns.long()] = panels.own.numbers.float()
    return values


def _times(numbers: Tensor, outer: Tensor | None, panels: Panels) -> Tensor:
    """Those of groups, [N, G] in fp32, times the outer ones."""
    found = by_output(numbers.float(), panels.shape[0])
    if outer is None:
        return found
    each = by_output(outer.float(), panels.shape[0])
    return found * each.repeat_interleave(panels.each, 1)


def _unsigned(codes: Tensor, bits: int) -> Tensor:
    """Codes [N, K] as panels store them, uint8."""
    if codes.dtype == torch.uint8:
        return codes
    if codes.dtype != _E4M3:
        return (codes.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    raw = codes.view(torch.uint8)
    if bits == 8:
        return raw
    nibbles = torch.zeros(256, dtype=torch.uint8)
    for index, magnitude in enumerate(_MAGNITUDES):
        nibbles[magnitude], nibbles[magnitude | 0x80] = index, index | 8
    return nibbles[raw.int()]


def _signed(unsigned: Tensor, panels: Panels) -> Tensor:
    """The inverse."""
    if panels.kind in ("uint", "iq4"):
        return unsigned
    if panels.kind == "int":
        return (unsigned.to(torch.int16) - (1 << (panels.bits - 1))).to(torch.int8)
    if panels.kind == "e2m1":
        bytes_ = torch.tensor(_MAGNITUDES, dtype=torch.uint8)
        unsigned = torch.cat((bytes_, bytes_ | 0x80))[unsigned.int()]
    return unsigned.view(_E4M3)


def _arranged(unsigned: Tensor, bits: int, layout: Layout) -> Tensor:
    """[N, K] in the layout."""
    n, k = unsigned.shape
    filled = pad(unsigned, (0, places(k, bits, layout) - k, 0, -n % PANEL))
    each = 8 // bits
    if layout == "dots":
        # [panel, output, step, code of a byte, byte]
        parts = filled.view(-1, PANEL, filled.shape[1] // (4 * each), each, 4)
        return _joined(parts, 3, bits).transpose(1, 2).contiguous()
    # [panel, output, chunk, byte, code of a byte, lane]
    parts = filled.view(-1, PANEL, filled.shape[1] * bits // 512, 4, each, 16)
    return _joined(parts, 4, bits).permute(0, 2, 1, 4, 3).contiguous()


def _by_column(panels: Panels) -> Tensor:
    """Codes as panels store them, uint8 [N, K], each column in its own place again."""
    n, k = panels.shape
    if panels.layout == "dots":
        parts = _apart(panels.codes.transpose(1, 2), 3, panels.bits)
    else:
        parts = _apart(panels.codes.permute(0, 2, 1, 4, 3), 4, panels.bits)
    unsigned = parts.reshape(-1, places(k, panels.bits, panels.layout))[:n, :k]
    return unsigned.contiguous() if panels.columns is None else _in_place(unsigned, panels.columns)


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
