"""Bytes of blocks, taken apart and put together: where each bit of compress_kernels.blocks.layouts'
types lies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from compress_kernels.blocks.layouts import BlockLayout, Plane


@dataclass(frozen=True, slots=True, eq=False)
class BlockFields:
    """What blocks say, of any type.

    codes: uint8 [M, numbers]. d: fp16 [M]. scales: int16 [M, subs]. dmin: fp16 [M] and minima:
    int16 [M, subs], None of a type without.
    """

    codes: Tensor
    d: Tensor
    scales: Tensor
    dmin: Tensor | None
    minima: Tensor | None


@dataclass(frozen=True, slots=True)
class ScaleBytes:
    """How a type packs its sub-blocks' scales, and minima if it has them: bytes of a block, and
    both ways between uint8 [M, bytes] and int16 [M, subs] of each."""

    size: int
    unpack: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    pack: Callable[[Tensor, Tensor | None], Tensor]


def unpack(layout: BlockLayout, blocks: Tensor) -> BlockFields:
    """blocks: uint8 [M, size]."""
    cut = torch.split(blocks, list(part_sizes(layout).values()), 1)
    parts = dict(zip(layout.parts, cut, strict=True))
    codes = _unpack_plane(parts["low"], layout.low)
    if layout.high is not None:
        codes = codes | _unpack_plane(parts["high"], layout.high) << layout.low.bits
    if layout.low.bits == 8:
        codes = codes ^ 128  # of two's complement
    halves = {name: parts[name].contiguous().view(torch.float16)[:, 0] for name in _halves(layout)}
    ones = torch.ones(len(blocks), layout.subs, dtype=torch.int16, device=blocks.device)
    scales, minima = ones, -ones if layout.minima else None
    if "scales" in parts:
        scales, minima = SCALE_BYTES[layout.name].unpack(parts["scales"])
    return BlockFields(codes, halves["d"], scales, halves.get("dmin"), minima)


def pack(layout: BlockLayout, fields: BlockFields) -> Tensor:
    """uint8 [M, size]."""
    codes = fields.codes ^ 128 if layout.low.bits == 8 else fields.codes
    low = codes & (1 << layout.low.bits) - 1
    parts = {"low": _pack_plane(low, layout.low), "d": _bytes(fields.d)}
    if fields.dmin is not None:
        parts["dmin"] = _bytes(fields.dmin)
    if layout.high is not None:
        parts["high"] = _pack_plane(codes >> layout.low.bits, layout.high)
    if "scales" in layout.parts:
        parts["scales"] = SCALE_BYTES[layout.name].pack(fields.scales, fields.minima)
    return torch.cat([parts[name] for name in layout.parts], 1)


def part_sizes(layout: BlockLayout) -> dict[str, int]:
    """Bytes of each part of a block, in their order."""
    sizes = {"d": 2, "dmin": 2, "low": layout.numbers * layout.low.bits // 8}
    sizes["high"] = layout.numbers * (layout.bits - layout.low.bits) // 8
    if layout.name in SCALE_BYTES:
        sizes["scales"] = SCALE_BYTES[layout.name].size
    return {part: sizes[part] for part in layout.parts}


def halves_of(layout: BlockLayout, blocks: Tensor) -> Tensor:
    """The scale of each block, and its minimum where the type has one: fp16 [M, 1 or 2]. blocks:
    uint8 [M, size]."""
    cut = torch.split(blocks, list(part_sizes(layout).values()), 1)
    parts = dict(zip(layout.parts, cut, strict=True))
    return torch.cat([parts[name] for name in _halves(layout)], 1).view(torch.float16)


def _halves(layout: BlockLayout) -> tuple[str, ...]:
    return tuple(part for part in layout.parts if part in ("d", "dmin"))


def _bytes(halves: Tensor) -> Tensor:
    return halves.contiguous().view(torch.uint8).view(-1, 2)


def _shifts(plane: Plane, like: Tensor) -> Tensor:
    """How far up in a byte each of its numbers is, [8 / bits, 1]."""
    return torch.arange(0, 8, plane.bits, dtype=torch.uint8, device=like.device)[:, None]


def _unpack_plane(data: Tensor, plane: Plane) -> Tensor:
    """uint8 [M, bytes] -> uint8 [M, numbers]."""
    data = data.reshape(len(data), -1, 1, plane.width)
    return ((data >> _shifts(plane, data)) & (1 << plane.bits) - 1).reshape(len(data), -1)


def _pack_plane(values: Tensor, plane: Plane) -> Tensor:
    """uint8 [M, numbers] -> uint8 [M, bytes]."""
    values = values.view(len(values), -1, 8 // plane.bits, plane.width)
    return (values << _shifts(plane, values)).sum(2, dtype=torch.uint8).reshape(len(values), -1)


def _unpack_q2(data: Tensor) -> tuple[Tensor, Tensor]:
    return (data & 15).to(torch.int16), (data >> 4).to(torch.int16)


def _pack_q2(scales: Tensor, minima: Tensor | None) -> Tensor:
    assert minima is not None
    return (scales | minima << 4).to(torch.uint8)


def _unpack_q3(data: Tensor) -> tuple[Tensor, None]:
    """16 of 6 bits, 32 too large: the low 4 in 8 bytes, the high 2 in 4."""
    low = _unpack_plane(data[:, :8], Plane(4, 8))
    high = _unpack_plane(data[:, 8:], Plane(2, 4))
    return (low | high << 4).to(torch.int16) - 32, None


def _pack_q3(scales: Tensor, _: Tensor | None) -> Tensor:
    whole = (scales + 32).to(torch.uint8)
    return torch.cat(
        (_pack_plane(whole & 15, Plane(4, 8)), _pack_plane(whole >> 4, Plane(2, 4))), 1
    )


def _unpack_q4(data: Tensor) -> tuple[Tensor, Tensor]:
    """8 of 6 bits each: 4 bytes of scales, 4 of minima, whose high 2 bits belong to the others, and
    4 bytes of the others' low 4 bits."""
    first, second, rest = data[:, :4], data[:, 4:8], data[:, 8:]
    scales = torch.cat((first & 63, (rest & 15) | first >> 6 << 4), 1)
    minima = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), 1)
    return scales.to(torch.int16), minima.to(torch.int16)


def _pack_q4(scales: Tensor, minima: Tensor | None) -> Tensor:
    assert minima is not None
    s, m = scales.to(torch.uint8), minima.to(torch.uint8)
    first, second = s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6
    return torch.cat((first, second, (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4), 1)


def _unpack_q6(data: Tensor) -> tuple[Tensor, None]:
    return data.contiguous().view(torch.int8).to(torch.int16), None


def _pack_q6(scales: Tensor, _: Tensor | None) -> Tensor:
    return scales.to(torch.int8).view(torch.uint8)


def _unpack_iq4(data: Tensor) -> tuple[Tensor, None]:
    """8 of 6 bits, 32 too large: the high 2 in 2 bytes, the low 4 in 4."""
    high = _unpack_plane(data[:, :2], Plane(2, 1))
    low = _unpack_plane(data[:, 2:], Plane(4, 1))
    return (low | high << 4).to(torch.int16) - 32, None


def _pack_iq4(scales: Tensor, _: Tensor | None) -> Tensor:
    whole = (scales + 32).to(torch.uint8)
    return torch.cat(
        (_pack_plane(whole >> 4, Plane(2, 1)), _pack_plane(whole & 15, Plane(4, 1))), 1
    )


SCALE_BYTES: Mapping[str, ScaleBytes] = MappingProxyType(
    {
        "Q2_K": ScaleBytes(16, _unpack_q2, _pack_q2),
        "Q3_K": ScaleBytes(12, _unpack_q3, _pack_q3),
        "Q4_K": ScaleBytes(12, _unpack_q4, _pack_q4),
        "Q5_K": ScaleBytes(12, _unpack_q4, _pack_q4),
        "Q6_K": ScaleBytes(16, _unpack_q6, _pack_q6),
        "IQ4_XS": ScaleBytes(6, _unpack_iq4, _pack_iq4),
    }
)
