"""Blocks of llama.cpp by csrc/blocks/super_blocks.cpp and settle.cpp; the specification is
reference.super_blocks."""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress_kernels.blocks.bytes import part_sizes
from compress_kernels.blocks.layouts import BlockLayout
from compress_kernels.blocks.search import BlockSearch
from compress_kernels.cpu.library import FLOAT_KINDS, address, native

# As in csrc/blocks/bytes.h.
PACKINGS = {"Q2_K": 1, "Q3_K": 2, "Q4_K": 3, "Q5_K": 3, "Q6_K": 4, "IQ4_XS": 5}
PARTS = ("d", "dmin", "scales", "low", "high")


def _fields(kind: type[Any], names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class BlockKind(ctypes.Structure):
    """Mirrors `BlockKind` in csrc/blocks/bytes.h."""

    _fields_ = _fields(
        ctypes.c_int32,
        "numbers size sub centre bits low_bits low_width high_width at_d at_dmin at_scales at_low"
        " at_high scale_low scale_high minima packing table",
    )


class Candidates(ctypes.Structure):
    """Mirrors `Candidates` in csrc/blocks/search.h."""

    _fields_ = [*_fields(ctypes.c_void_p, "first second"), *_fields(ctypes.c_int32, "count rounds")]


class SharedCandidates(ctypes.Structure):
    """Mirrors `SharedCandidates` in csrc/blocks/shared_scales.h."""

    _fields_ = [
        *_fields(ctypes.c_void_p, "scales minima"),
        *_fields(ctypes.c_int32, "scale_count minimum_count rounds reach"),
    ]


class RoundBlocks(ctypes.Structure):
    """Mirrors `RoundBlocks` in csrc/blocks/super_blocks.cpp."""

    _fields_ = [
        ("kind", BlockKind),
        ("candidates", Candidates),
        ("shared", SharedCandidates),
        *_fields(ctypes.c_void_p, "weight importance data"),
        *_fields(ctypes.c_int64, "rows width stride"),
        ("threads", ctypes.c_int32),
    ]


class DecodeBlocks(ctypes.Structure):
    """Mirrors `DecodeBlocks` in csrc/blocks/super_blocks.cpp."""

    _fields_ = [
        ("kind", BlockKind),
        *_fields(ctypes.c_void_p, "data index out"),
        *_fields(ctypes.c_int64, "rows blocks"),
        ("factor", ctypes.c_float),
        *_fields(ctypes.c_int32, "out_kind threads"),
    ]


class SettleBlocks(ctypes.Structure):
    """Mirrors `SettleBlocks` in csrc/blocks/settle.cpp."""

    _fields_ = [
        ("kind", BlockKind),
        *((name, ctypes.c_void_p) for name in ("weight", "factor", "order", "data", "lost")),
        *(
            (name, ctypes.c_int64)
            for name in ("rows", "width", "stride", "factor_stride", "data_stride")
        ),
        ("threads", ctypes.c_int32),
    ]


@cache
def kind_struct(layout: BlockLayout) -> BlockKind:
    """The C form of a type."""
    places, at = dict.fromkeys(PARTS, -1), 0
    for part, size in part_sizes(layout).items():
        places[part] = at
        at += size
    high = 0 if layout.high is None else layout.high.width
    return BlockKind(
        layout.numbers, layout.size, layout.sub, layout.centre, layout.bits,
        layout.low.bits, layout.low.width, high, *places.values(),
        *layout.scale_range, layout.minima, PACKINGS.get(layout.name, 0),
        layout.levels is not None,
    )  # fmt: skip


def round_blocks(
    layout: BlockLayout, weight: Tensor, importance: Tensor, search: BlockSearch
) -> Tensor:
    """As reference.super_blocks.round_blocks."""
    library = native().library
    assert library is not None, "the op falls back to the reference"
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    importance = importance.contiguous()
    rows, width = weight.shape
    data = torch.empty(rows, width // layout.numbers * layout.size, dtype=torch.uint8)
    about = RoundBlocks(
        kind_struct(layout),
        Candidates(
            search.first.data_ptr(), search.second.data_ptr(), search.first.numel(), search.rounds
        ),
        SharedCandidates(
            search.scale_ratios.data_ptr(), search.minimum_ratios.data_ptr(),
            search.scale_ratios.numel(), search.minimum_ratios.numel(),
            search.shared_rounds, search.reach,
        ),
        weight.data_ptr(), importance.data_ptr(), data.data_ptr(),
        rows, width, weight.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    library.round_blocks(ctypes.byref(about))
    return data


def decode_blocks(layout: BlockLayout, data: Tensor) -> Tensor:
    """As reference.super_blocks.decode_blocks."""
    library = native().library
    assert library is not None, "the op falls back to the reference"
    data = data.contiguous()
    width = data.shape[1] // layout.size * layout.numbers
    out = torch.empty(data.shape[0], width, dtype=torch.float32)
    library.decode_blocks(ctypes.byref(decode_struct(layout, data, out)))
    return out


def decode_struct(
    layout: BlockLayout, data: Tensor, out: Tensor, index: Tensor | None = None, factor: float = 1.0
) -> DecodeBlocks:
    """What the C function is given: addresses of tensors that must outlive it, none with gaps.
    index: int64 [rows], of each row of `out`, fp32 or bf16, which of the data; None for the same.
    Numbers are rounded to its dtype, and again behind the factor."""
    return DecodeBlocks(
        kind_struct(layout), data.data_ptr(), address(index), out.data_ptr(),
        len(out), data.shape[1] // layout.size, factor, FLOAT_KINDS[out.dtype],
        torch.get_num_threads(),
    )  # fmt: skip


def settle_blocks(
    layout: BlockLayout, weight: Tensor, data: Tensor, factor: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    """As reference.super_blocks.settle_blocks."""
    library = native().library
    assert library is not None, "the op falls back to the reference"
    weight, factor = (x if x.stride(1) == 1 else x.contiguous() for x in (weight, factor))
    order, data = order.to(torch.int32).contiguous(), data.clone()
    lost = torch.empty(weight.shape, dtype=torch.float32)
    about = SettleBlocks(
        kind_struct(layout), weight.data_ptr(), factor.data_ptr(), order.data_ptr(),
        data.data_ptr(), lost.data_ptr(), *weight.shape, weight.stride(0), factor.stride(0),
        data.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    library.settle_blocks(ctypes.byref(about))
    return data, lost
