"""Integer codes as MatMulNBits and GatherBlockQuantized read them: unsigned, in blocks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import QuantizedTensor

# Sizes of blocks, best first; a larger group is several blocks of the same scale.
SIZES = (128, 64, 32, 16)
WIDTHS = (2, 4, 8)  # bits of a code


@dataclass(frozen=True, slots=True)
class Layout:
    """bits: of a stored code, one of WIDTHS. size: columns of a block, which share a scale. zeros:
    whether blocks have zero points."""

    bits: int
    size: int
    zeros: bool

    def count(self, columns: int) -> int:
        """Blocks of a row; the last one may be filled up."""
        return -(-columns // self.size)

    def width(self, columns: int) -> int:
        """Bytes of a row's codes."""
        return self.count(columns) * self.size * self.bits // 8

    def zeros_width(self, columns: int) -> int:
        """Bytes of a row's zero points."""
        return -(-self.count(columns) * self.bits // 8)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """codes: uint8 [N, width], low bits first. scales: fp32 [N, count]. zeros: uint8
    [N, zeros_width], None where every zero point is the middle code."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None


def layout(scheme: QuantScheme, columns: int, linear: str, least: int = WIDTHS[0]) -> Layout:
    """How a weight of `columns` is stored, codes widened to the next width from `least` on;
    RecipeError for what has no place."""
    if scheme.type != "int":
        raise RecipeError(
            f"{linear} is {scheme.describe()}, and onnx-genai computes with integers of 2 to 8 bits"
            " only; export to onnx, or quantize to int4 or int8"
        )
    size = _size(scheme.groups(columns), scheme.columns_per_scale(columns), columns)
    if size is None:
        raise RecipeError(
            f"{linear} has groups of {scheme.group_size} columns, and onnx-genai has blocks of"
            f" {', '.join(map(str, SIZES[::-1]))}; take a multiple of {SIZES[-1]}, or export to"
            " onnx"
        )
    bits = next(width for width in WIDTHS if width >= max(scheme.bits, least))
    return Layout(bits, size, not scheme.symmetric)


def _size(groups: int, group: int, columns: int) -> int | None:
    if groups == 1:  # any will do; one that leaves nothing over wastes nothing
        return next((size for size in SIZES if columns % size == 0), SIZES[-1])
    return next((size for size in SIZES if group % size == 0), None)


def blocks(weight: QuantizedTensor, how: Layout, order: Tensor | None = None) -> Blocks:
    """order: int64 [K], the column that comes first, second and so on: with it, columns of a group
    lie together. Columns that are kept apart as outliers count nothing."""
    k = weight.shape[1]
    scheme, count, middle = weight.scheme, how.count(k), 1 << (how.bits - 1)
    first = torch.arange(count) * how.size // scheme.columns_per_scale(k)
    codes = weight.codes
    if weight.outliers is not None:
        columns, codes = weight.outliers.columns, codes.clone()
        codes[:, columns] = _zeros(weight, weight.column_groups()[columns])
    codes = _unsigned(codes if order is None else codes[:, order], middle)
    codes = torch.nn.functional.pad(codes, (0, count * how.size - k), value=middle)
    zeros = pack(_unsigned(_zeros(weight, first), middle), how.bits) if how.zeros else None
    return Blocks(pack(codes, how.bits), _rows(weight.scale.float(), weight)[:, first], zeros)


def _unsigned(codes: Tensor, middle: int) -> Tensor:
    """int8 -> uint8, the middle added; bytes wrap around to what is meant."""
    return codes.contiguous().view(torch.uint8) + middle


def _zeros(weight: QuantizedTensor, groups: Tensor) -> Tensor:
    """Zero points of some groups, int8 [N, groups]."""
    if weight.zero is None:
        return torch.zeros(weight.shape[0], groups.numel(), dtype=torch.int8)
    return _rows(weight.zero, weight)[:, groups]


def _rows(values: Tensor, weight: QuantizedTensor) -> Tensor:
    """[rows that share, G] -> [N, G]."""
    n = weight.shape[0]
    rows = weight.scheme.rows_per_scale(n)
    return values if rows == 1 else values.repeat_interleave(rows, dim=0)[:n]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [N, K] below 2^bits -> uint8 [N, ceil(K * bits / 8)], the first one lowest."""
    each = 8 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each))
    parts = codes.reshape(codes.shape[0], -1, each)
    out = parts[..., 0].clone()
    for place in range(1, each):
        out |= parts[..., place] << (bits * place)
    return out
