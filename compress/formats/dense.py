"""Dense: the dequantized weight under its own name, for loaders that take nothing else.

The file is as large as the source; what it shows is the quality of the scheme. Rounding happens
once, from the exact (code - zero) * scale in fp32 to the dtype of the source.
"""

import torch
from torch import Tensor

from compress.checkpoint.shards.layout import Entry
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import QuantizedTensor

NAME = "dense"


def why_not(
    scheme: QuantScheme, shape: tuple[int, int] | None = None, *, g_idx: bool = False
) -> None:
    """A dense checkpoint holds any weight."""


def layout(
    name: str,
    shape: tuple[int, int],
    scheme: QuantScheme,
    scale_dtype: str,
    *,
    act_order: bool = False,
    transposed: bool = False,
) -> list[Entry]:
    """One tensor, in the source's dtype (`scale_dtype`) and order on disk."""
    return [(name, scale_dtype, shape[::-1] if transposed else shape)]


def encode(
    name: str,
    tensor: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    transposed: bool = False,
) -> dict[str, Tensor]:
    """The dequantized weight [N, K], or [K, N] when the source stores it transposed.

    dtype: the source's; the scales' when None, which most schemes share with the source.
    """
    weight = tensor.dequantize(tensor.scale.dtype if dtype is None else dtype)
    return {name: weight.t().contiguous() if transposed else weight}
