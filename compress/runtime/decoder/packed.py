"""A quantized weight as the engine keeps it: codes packed, decoded a few rows at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from compress.formats.fp4 import pack_fp4, unpack_fp4
from compress.quant.packing import pack, unpack
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import OutlierColumns, QuantizedTensor

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
        rest, scheme = self.rest, self.rest.scheme
        cells = slice(None)
        if scheme.granularity != "tensor":
            height = scheme.rows_per_scale(self.shape[0])
            cells = slice(rows.start // height, -(-rows.stop // height))
        outliers = rest.outliers
        return replace(
            rest,
            codes=_unpacked(self.codes[rows], scheme, self.shape[1]),
            scale=rest.scale[cells],
            zero=None if rest.zero is None else rest.zero[cells],
            outliers=outliers and OutlierColumns(outliers.columns, outliers.weight[rows]),
        )


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
