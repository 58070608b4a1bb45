"""Codes that are packed as in a file, and decoded a few rows at a time for a product."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from compress.quant.fp4 import pack_fp4, unpack_fp4
from compress.quant.packing import pack, unpack, words_for
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import InputQuantization, OutlierColumns, QuantizedTensor
from compress.runtime.forms.form import Arithmetic, LinearFacts, LinearWeight
from compress.runtime.forms.input_rounding import rounded
from compress_kernels.ops.linear import linear

# Weights that are decoded at once: 4 MB in fp32, which caches hold.
DECODED = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """codes: of 2 to 7 bits int32 [N, words], of E2M1 uint8 [N, K / 2], else as they are, [N, K].

    rest: scales, zeros and everything else of the tensor, with codes of no columns.
    rounded_to: the dtype of the checkpoint's dense weights, which decoded values are rounded to
    once: so the engine and a block-streamed evaluation run the same weights.
    """

    codes: Tensor
    rest: QuantizedTensor
    shape: tuple[int, int]
    rounded_to: torch.dtype

    @classmethod
    def of(
        cls, tensor: QuantizedTensor, device: torch.device, rounded_to: torch.dtype = torch.float32
    ) -> "PackedWeight":
        """device: where it is kept."""
        codes = _packed(tensor.codes, tensor.scheme).to(device)
        rest = _moved(replace(tensor, codes=tensor.codes[:, :0]), device)
        return cls(codes, rest, tensor.shape, rounded_to)

    @property
    def nbytes(self) -> int:
        """All that is kept."""
        return self.codes.nbytes + sum(tensor.nbytes for tensor in _tensors(self.rest))

    def tiles(self) -> Iterator[slice]:
        """Rows that are decoded at once; squares that share a scale stay whole."""
        n, k = self.shape
        scheme = self.rest.scheme
        step = scheme.group_size if scheme.granularity == "block" else 16
        rows = max(1, DECODED // k // step) * step
        for start in range(0, n, rows):
            yield slice(start, min(start + rows, n))

    def dequantize(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Some rows of the weight, [rows, K]: a tile, or all."""
        return self.part(rows).dequantize(self.rounded_to).to(dtype)

    def part(self, rows: slice) -> QuantizedTensor:
        """Some rows, their codes not packed; squares that share a scale are whole."""
        codes = _unpacked(self.codes[rows], self.rest.scheme, self.shape[1])
        return replace(self.rest.part(rows), codes=codes)

    def matmul(self, x: Tensor, inputs: InputQuantization | None, bias: Tensor | None) -> Tensor:
        x = x if inputs is None else rounded(x, inputs)
        out = x.new_empty(len(x), self.shape[0])
        for rows in self.tiles():
            own = None if bias is None else bias[rows]
            linear(x, self.dequantize(rows, x.dtype), own, out[:, rows])
        return out

    def joined(self, others: tuple[LinearWeight, ...]) -> None:
        return None


@dataclass(frozen=True, slots=True)
class DecodedTiles:
    """Takes every scheme: `QuantizedTensor.dequantize()` gives the numbers that are multiplied."""

    name: str = "codes that are decoded in tiles"
    joins: bool = False

    def why_not(self, facts: LinearFacts, how: Arithmetic) -> None:
        return None

    def nbytes(self, facts: LinearFacts, how: Arithmetic) -> int:
        """Codes, scales and zeros."""
        scheme, (rows, columns) = facts.scheme, facts.shape
        assert scheme is not None, "dense weights have a table of their own"
        scales = prod(scheme.scale_shape(rows, columns))
        zero = torch.int8.itemsize * (not scheme.symmetric)
        return rows * _row_bytes(scheme, columns) + scales * (facts.stored.itemsize + zero)

    def pack(self, weight: QuantizedTensor, facts: LinearFacts, how: Arithmetic) -> PackedWeight:
        return PackedWeight.of(weight, how.device, facts.plain)


def _row_bytes(scheme: QuantScheme, columns: int) -> int:
    """Of the codes of a row, as `_packed` leaves them."""
    if scheme.is_fp4:
        return columns // 2
    if scheme.type == "int" and scheme.bits < 8:
        return words_for(columns, scheme.bits) * 4
    return columns


def _packed(codes: Tensor, scheme: QuantScheme) -> Tensor:
    if scheme.is_fp4:
        return pack_fp4(codes)
    if scheme.type == "int" and scheme.bits < 8:
        return pack(codes, scheme.bits)
    return codes


def _unpacked(codes: Tensor, scheme: QuantScheme, columns: int) -> Tensor:
    if scheme.is_fp4:
        return unpack_fp4(codes)
    if scheme.type == "int" and scheme.bits < 8:
        return unpack(codes, scheme.bits, columns)
    return codes


def _moved(tensor: QuantizedTensor, device: torch.device) -> QuantizedTensor:
    """Each part in memory of its own: a view would keep all that it is a view of."""
    outliers = tensor.outliers
    if outliers is not None:
        columns, weight = outliers.columns, outliers.weight
        outliers = OutlierColumns(columns.to(device, copy=True), weight.to(device, copy=True))
    found: dict[str, Any] = {
        field.name: value.to(device, copy=True)
        for field in fields(tensor)
        if isinstance(value := getattr(tensor, field.name), Tensor)
    }
    return replace(tensor, outliers=outliers, **found)


def _tensors(tensor: QuantizedTensor) -> Iterator[Tensor]:
    for holder in (tensor, tensor.outliers):
        if holder is not None:
            values = (getattr(holder, field.name) for field in fields(holder))
            yield from (value for value in values if isinstance(value, Tensor))
