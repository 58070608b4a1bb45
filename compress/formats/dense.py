"""Dense: the dequantized weight under its own name, for loaders that take nothing else.

The file is as large as the source; what it shows is the quality of the scheme. Rounding happens
once, from the exact (code - zero) * scale in fp32 to the dtype of the source.
"""

from torch import Tensor

from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.checkpoint.shards.layout import Entry
from compress.formats.storage import WeightStorage
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import QuantizedTensor

NAME = "dense"


def why_not(
    scheme: QuantScheme, shape: tuple[int, int] | None = None, *, g_idx: bool = False
) -> None:
    """A dense checkpoint holds any weight."""


def layout(how: WeightStorage) -> list[Entry]:
    """One tensor, in the source's dtype and order on disk."""
    return [(how.name, how.dtype, how.shape[::-1] if how.transposed else how.shape)]


def encode(how: WeightStorage, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """The dequantized weight [N, K], or [K, N] when the source stores it transposed."""
    how.expect(tensor)
    weight = tensor.dequantize(TORCH_DTYPES[how.dtype])
    return {how.name: weight.t().contiguous() if how.transposed else weight}
