"""Weights as GGUF lays them out: blocks of 32 numbers of a row with a scale in fp16.

Q4_0: a number is (u - 8) * d, u of 4 bits. Q4_1: u * d + m. Q8_0: q * d, q of 8 bits. In 4 bits the
low halves of a block's 16 bytes are its first 16 numbers, the high halves the others.
"""

from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.quant.ggml_kinds import BLOCK
from compress.quant.tensor import QuantizedTensor, is_trivial


def needs_codes(tensor: QuantizedTensor) -> bool:
    """Whether `why_not_blocks` looks at codes; of other weights it takes them without values."""
    return tensor.scheme.bits == 8 and _zeros(tensor)


def why_not_blocks(tensor: QuantizedTensor) -> str | None:
    """Why no kind of block holds a weight without rounding its codes, None when one does."""
    scheme = tensor.scheme
    k = tensor.shape[1]
    if scheme.type == "float":
        return "their codes are floats"
    if tensor.outliers is not None:
        return "they have columns in 16 bits"
    if tensor.input_factor is not None:
        return "their inputs are multiplied by factors"
    if tensor.g_idx is not None and not is_trivial(tensor.g_idx, scheme):
        return "neighbouring columns are in different groups (act-order)"
    if k % BLOCK:
        return f"rows of {k} numbers are no whole blocks of {BLOCK}"
    if scheme.granularity in ("group", "block") and scheme.group_size % BLOCK:
        return f"groups of {scheme.group_size} are no whole blocks of {BLOCK}"
    if needs_codes(tensor) and int(_centred(tensor).abs().max()) > 127:
        return "codes less their zero points need more than 8 bits"
    return None


def _centred(tensor: QuantizedTensor) -> Tensor:
    """code - zero: int16 [N, K]."""
    codes = tensor.codes.to(torch.int16)
    if tensor.zero is None:
        return codes
    return codes - tensor.zero.to(torch.int16)[_cells(tensor)][:, tensor.column_groups()]


def _cells(tensor: QuantizedTensor) -> Tensor:
    """Row of the scales that each row has, int64 [N]."""
    n = tensor.shape[0]
    return torch.arange(n) // tensor.scheme.rows_per_scale(n)


def kind_of(tensor: QuantizedTensor) -> str:
    """The smallest kind that holds its codes."""
    if tensor.scheme.bits > 4:
        return "Q8_0"
    return "Q4_1" if _zeros(tensor) else "Q4_0"


def _zeros(tensor: QuantizedTensor) -> bool:
    """Whether any zero point is not 0."""
    return tensor.zero is not None and bool(tensor.zero.any())


def offsets(tensor: QuantizedTensor) -> Tensor:
    """What the least code of Q4_1 stands for, fp32, shaped as the scale."""
    assert tensor.zero is not None
    return -(tensor.zero.float() + 8) * tensor.scale.float()


def _by_block(values: Tensor, tensor: QuantizedTensor) -> Tensor:
    """Numbers of groups, shaped as the scale -> of blocks, [N, K / 32]."""
    return values[_cells(tensor)][:, tensor.column_groups()[::BLOCK]]


def encode(tensor: QuantizedTensor, kind: str, rows: Tensor | None) -> NDArray[np.uint8]:
    """Bytes [N, K / 32 * size]. rows: where each row comes from. Scales are rounded to fp16."""
    return ENCODERS[kind](tensor, slice(None) if rows is None else rows)


_Rows = Tensor | slice


def _steps(tensor: QuantizedTensor) -> Tensor:
    """What a code is worth in each block, fp32 [N, K / 32]."""
    return _by_block(tensor.scale.float(), tensor)


def _q4_0(tensor: QuantizedTensor, rows: _Rows) -> NDArray[np.uint8]:
    return _joined(halves(_steps(tensor)[rows]), _nibbles(tensor.codes[rows]))


def _q4_1(tensor: QuantizedTensor, rows: _Rows) -> NDArray[np.uint8]:
    scale, low = _steps(tensor), _by_block(offsets(tensor), tensor)
    return _joined(halves(scale[rows]), halves(low[rows]), _nibbles(tensor.codes[rows]))


def _q8_0(tensor: QuantizedTensor, rows: _Rows) -> NDArray[np.uint8]:
    codes = _centred(tensor)[rows].to(torch.int8).numpy().view(np.uint8)
    return _joined(halves(_steps(tensor)[rows]), codes.reshape(len(codes), -1, BLOCK))


def halves(values: Tensor) -> NDArray[np.uint8]:
    """fp32 [N, blocks] -> bytes of fp16, [N, blocks, 2]."""
    return values.to(torch.float16).numpy()[..., None].view(np.uint8)


def _nibbles(codes: Tensor) -> NDArray[np.uint8]:
    """[N, blocks, 16] of codes -8 to 7."""
    values = (codes.numpy() + np.int8(8)).view(np.uint8).reshape(len(codes), -1, 2, BLOCK // 2)
    packed: NDArray[np.uint8] = values[:, :, 0] | (values[:, :, 1] << np.uint8(4))
    return packed


def _joined(*parts: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Parts of each block, [N, blocks, bytes] -> [N, bytes]."""
    return np.concatenate(parts, axis=-1).reshape(len(parts[0]), -1)


ENCODERS = MappingProxyType({"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0})
