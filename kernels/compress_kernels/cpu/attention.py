"""Attention over blocks by csrc/attention/attention.cpp; the specification is
reference.attention."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from compress_kernels.cpu.library import FLOAT_KINDS, STATE_KINDS, address, native
from compress_kernels.paged import StoredStates, TokenPlaces


class AttentionStruct(ctypes.Structure):
    """Mirrors `Attention` in csrc/attention/attention_plan.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values")),
        *((name, ctypes.c_void_p) for name in ("key_scales", "value_scales")),
        *((name, ctypes.c_void_p) for name in ("table", "sequence", "positions", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "dim")),
        *((name, ctypes.c_int64) for name in ("value_dim", "value_stride", "block_size")),
        *((name, ctypes.c_int64) for name in ("table_stride", "window")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("kind", ctypes.c_int32),
        ("outer_kind", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


def paged_attention(
    q: Tensor,
    stored: StoredStates,
    places: TokenPlaces,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As attention.paged_attention, arguments checked."""
    library = native().library
    assert library is not None, "the op falls back to tiles"
    q, table = q.contiguous(), places.table.contiguous()
    sequence, positions = places.sequence.contiguous(), places.positions.contiguous()
    out = q.new_empty(*q.shape[:2], stored.values.shape[3])
    settings = AttentionSettings(scale, window, softcap)
    task = attention_struct(q, stored, TokenPlaces(table, sequence, positions), settings, out)
    library.paged_attention(ctypes.byref(task))
    return out


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """How tokens look at others: as the arguments of attention.paged_attention."""

    scale: float
    window: int | None
    softcap: float | None


def attention_struct(
    q: Tensor, stored: StoredStates, places: TokenPlaces, settings: AttentionSettings, out: Tensor
) -> AttentionStruct:
    """What the C function is given: addresses of tensors that must outlive it. q, out: floats
    [rows, heads, *] of one dtype; they and places without gaps."""
    return AttentionStruct(
        q=q.data_ptr(),
        keys=stored.keys.data_ptr(),
        values=stored.values.data_ptr(),
        key_scales=address(stored.key_scales),
        value_scales=address(stored.value_scales),
        table=places.table.data_ptr(),
        sequence=places.sequence.data_ptr(),
        positions=places.positions.data_ptr(),
        out=out.data_ptr(),
        rows=q.shape[0],
        heads=q.shape[1],
        kv_heads=stored.keys.shape[1],
        dim=q.shape[2],
        value_dim=out.shape[2],
        value_stride=stored.values.stride(2),
        block_size=stored.keys.shape[2],
        table_stride=places.table.stride(0),
        window=settings.window or 0,
        scale=settings.scale,
        softcap=settings.softcap or 0.0,
        kind=STATE_KINDS[stored.keys.dtype],
        outer_kind=FLOAT_KINDS[q.dtype],
        threads=torch.get_num_threads(),
    )
