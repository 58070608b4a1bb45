"""QuantizedTensor: the one logical form every method writes and every format encodes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.quant.scheme import QuantScheme


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A quantized weight [N, K], never packed.

    codes: int8 [N, K], inside the scheme's code range.
    scale: [N, G] ([1, 1] for granularity "tensor"), in the dtype it is stored in
        (bf16, fp16 or fp32): codes were chosen for exactly these values.
    zero: int8 [N, G] in the code range, None when symmetric.
    g_idx: int32 [K], the scale group of each column, None when column k is in group
        k // group_size (anything else is act-order).

    `dequantize()` is the specification that formats, kernels and exporters are tested against.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    g_idx: Tensor | None
    scheme: QuantScheme

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def column_groups(self) -> Tensor:
        """Scale group of every column: int64 [K]."""
        if self.g_idx is not None:
            return self.g_idx.long()
        k = self.codes.shape[1]
        return torch.arange(k, device=self.codes.device) // self.scheme.columns_per_scale(k)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(code - zero) * scale in fp32, then rounded once to `dtype`: [N, K]."""
        groups = self.column_groups()
        values = self.codes.float()
        if self.zero is not None:
            values -= self.zero.float()[:, groups]
        values *= self.scale.float()[:, groups]
        return values.to(dtype)
