"""GPTQ's loop within blocks by csrc/blocks/settle.cpp; the specification is
reference.settled_blocks."""

import ctypes

import torch
from torch import Tensor

from compress_kernels.cpu.library import native
from compress_kernels.cpu.super_blocks import BlockKind, kind_struct
from compress_kernels.super_blocks import BlockLayout


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


def settle_blocks(
    layout: BlockLayout, weight: Tensor, data: Tensor, factor: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    """As reference.settled_blocks.settle_blocks."""
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
