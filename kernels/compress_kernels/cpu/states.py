"""Keys and values into blocks by csrc/attention/states.cpp; the specification is
reference.states."""

import ctypes

import torch
from torch import Tensor

from compress_kernels.cpu.library import FLOAT_KINDS, STATE_KINDS, address, native


class States(ctypes.Structure):
    """Mirrors `States` in csrc/attention/states.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("source", "target", "scales", "slots")),
        *((name, ctypes.c_int64) for name in ("rows", "stride", "heads", "dim", "block_size")),
        *((name, ctypes.c_int32) for name in ("source_kind", "target_kind", "threads")),
    ]


def store_states(source: Tensor, target: Tensor, slots: Tensor, scales: Tensor | None) -> None:
    """As states.store_states, arguments checked."""
    library = native().library
    assert library is not None, "the op falls back to the reference"
    source = source if source.stride()[1:] == (source.shape[2], 1) else source.contiguous()
    slots = slots.contiguous()
    library.store_states(ctypes.byref(states_struct(source, target, slots, scales)))


def states_struct(source: Tensor, target: Tensor, slots: Tensor, scales: Tensor | None) -> States:
    """What the C function is given: addresses of tensors that must outlive it. source: [rows,
    heads, dim], rows apart; slots without gaps."""
    rows, heads, dim = source.shape
    return States(
        source.data_ptr(), target.data_ptr(), address(scales), slots.data_ptr(),
        rows, source.stride(0), heads, dim, target.shape[2],
        FLOAT_KINDS[source.dtype], STATE_KINDS[target.dtype], torch.get_num_threads(),
    )  # fmt: skip
