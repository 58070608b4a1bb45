"""NaN and infinity in stored values."""

from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1 << 20  # elements: the copy that a slow dtype needs stays at 4 MB
# aminmax carries NaN through and needs no mask: 12 ms against isfinite's 435 ms for 16M bf16.
_DIRECT = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_COUNTABLE = (*_DIRECT, torch.complex64)


@dataclass(frozen=True, slots=True)
class NonFinite:
    """How many values of a tensor are not finite, and the index of the first."""

    nan: int
    inf: int
    first: tuple[int, ...]

    def describe(self) -> str:
        """`3 NaN and 1 infinite values, the first at [12, 5]`."""
        return f"{self.nan} NaN and {self.inf} infinite values, the first at {list(self.first)}"

    def below(self, row: int) -> "NonFinite":
        """The same, found in a slice of dimension 0 that began at `row`."""
        return NonFinite(self.nan, self.inf, (self.first[0] + row, *self.first[1:]))


def find_nonfinite(tensor: Tensor) -> NonFinite | None:
    """What is not finite in a tensor of any dtype and shape; None when all is well."""
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return None
    flat = tensor.detach().reshape(-1)
    nan, inf, first = 0, 0, -1
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        if _all_finite(chunk):
            continue
        values = chunk if chunk.dtype in _COUNTABLE else chunk.float()
        chunk_nan = int(values.isnan().sum())
        bad = ~values.isfinite()
        nan, inf = nan + chunk_nan, inf + int(bad.sum()) - chunk_nan
        first = first if first >= 0 else start + int(bad.int().argmax())
    return NonFinite(nan, inf, _unravel(first, tensor.shape)) if first >= 0 else None


def _all_finite(chunk: Tensor) -> bool:
    if chunk.dtype.is_complex:
        chunk = torch.view_as_real(chunk).reshape(-1)
    if chunk.dtype not in _DIRECT:
        chunk = chunk.float()
    low, high = torch.aminmax(chunk)
    return bool(low.isfinite() & high.isfinite())


def _unravel(index: int, shape: torch.Size) -> tuple[int, ...]:
    place: list[int] = []
    for size in reversed(shape):
        index, position = divmod(index, size)
        place.append(position)
    return tuple(reversed(place))
