"""Integers of 4 and 8 bits as ONNX stores them."""

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

SIGNED = {4: ir.DataType.INT4, 8: ir.DataType.INT8}
UNSIGNED = {4: ir.DataType.UINT4, 8: ir.DataType.UINT8}


def width_of(bits: int) -> int:
    """The narrowest of ONNX's widths that holds codes of so many bits."""
    return 4 if bits <= 4 else 8


def as_integers(codes: Tensor, dtype: ir.DataType) -> ir.TensorProtocol:
    """Signed codes int8, any shape, as they are, or moved up by half the range where dtype is
    unsigned."""
    unsigned = dtype in UNSIGNED.values()
    width = 4 if dtype in (ir.DataType.INT4, ir.DataType.UINT4) else 8
    moved = codes.to(torch.int16) + (1 << (width - 1)) if unsigned else codes.to(torch.int16)
    numbers = (moved & ((1 << width) - 1)).to(torch.uint8).contiguous()
    if width == 8:
        array = numbers.numpy()
        return ir.Tensor(array if unsigned else array.view(np.int8), dtype)
    return ir.PackedTensor(_pairs(numbers.reshape(-1)).numpy(), dtype, shape=tuple(codes.shape))


def _pairs(nibbles: Tensor) -> Tensor:
    """uint8 numbers below 16, two a byte, the first one low."""
    if nibbles.numel() % 2:
        nibbles = torch.cat([nibbles, nibbles.new_zeros(1)])
    return nibbles[0::2] | (nibbles[1::2] << 4)
