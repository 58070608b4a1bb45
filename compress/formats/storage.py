"""How one weight is stored: what a format is told of it before any work, and again to write it."""

from dataclasses import dataclass

from compress.arch.spec import LinearSpec
from compress.checkpoint.shards.dtypes import DTYPE_CODES
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import QuantizedTensor


@dataclass(frozen=True, slots=True)
class WeightStorage:
    """name: of the weight in the source, "….weight". shape: logical, (N, K). dtype: code of the
    source's, which is that of the scales in formats that have none of their own for them.
    transposed: the source has it as [K, N]. act_order: its columns are grouped in another order,
    which a g_idx tells.
    """

    name: str
    shape: tuple[int, int]
    scheme: QuantScheme
    dtype: str
    transposed: bool = False
    act_order: bool = False

    @classmethod
    def of_linear(
        cls, linear: LinearSpec, scheme: QuantScheme, dtype: str, *, act_order: bool = False
    ) -> "WeightStorage":
        """Of a linear that is to be quantized."""
        return cls(linear.tensor, linear.shape, scheme, dtype, linear.transposed, act_order)

    @classmethod
    def of_tensor(
        cls, name: str, tensor: QuantizedTensor, dtype: str = "", *, transposed: bool = False
    ) -> "WeightStorage":
        """Of one that is quantized. dtype: without it that of its scales."""
        code = dtype or DTYPE_CODES[tensor.scale.dtype]
        reordered = tensor.g_idx is not None
        return cls(name, tensor.shape, tensor.scheme, code, transposed, reordered)

    def expect(self, tensor: QuantizedTensor) -> None:
        """AssertionError unless the tensor is what was announced."""
        found = (tensor.shape, tensor.scheme, tensor.g_idx is not None)
        wanted = (self.shape, self.scheme, self.act_order)
        assert found == wanted, f"{self.name}: {found} is not {wanted}"
