"""QuantizedTensor: the one logical form every method writes and every format encodes."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.quant.scheme import ActivationScheme, QuantScheme


@dataclass(frozen=True, slots=True, eq=False)
class OutlierColumns:
    """Input columns of a weight that are kept in 16 bit beside their codes (LLM.int8()).

    columns: int64 [O], ascending. weight: [N, O], in the source's dtype.
    """

    columns: Tensor
    weight: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class InputQuantization:
    """What happens to the inputs of one linear at run time.

    scale: [1], for a static scheme. columns: int64 [O], ascending, those that calibration fixed as
    outliers, for scheme.outliers "calibrated". factor: [K], what inputs are multiplied by before
    they are rounded (QuantizedTensor.input_factor), None for 1.
    """

    scheme: ActivationScheme
    scale: Tensor | None = None
    columns: Tensor | None = None
    factor: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A quantized weight [N, K], never packed.

    codes: int8 [N, K] in the scheme's code range; for a float scheme float8_e4m3fn [N, K], also
        for 4 bits (every E2M1 number is an E4M3 number).
    scale: `scheme.scale_shape(N, K)` ([N, G]; [1, 1] for granularity "tensor"), in the dtype it is
        stored in (bf16, fp16, fp32; E4M3 for NVFP4): codes were chosen for exactly these values.
    zero: int8, shaped as the scale, in the code range; None when symmetric.
    g_idx: int32 [K], the scale group of each column, None when column k is in group
        k // group_size (anything else is act-order).
    global_scale: NVFP4 only: fp32 [1], by which all scales are divided (compressed-tensors' way).
    global_factor: NVFP4 as ModelOpt stores it, in place of global_scale: fp32 [1], by which all
        scales are multiplied. Kept, since a reciprocal would not be exact.
    input_scale: static activations only: [1], in the dtype it is stored in.
    outliers: columns whose 16-bit weights stand in for their codes.
    input_factor: [K]: the runtime multiplies inputs by it, then rounds them where the scheme says
        so, then multiplies with (code - zero) * scale (ModelOpt's pre_quant_scale). The weight as
        it acts on plain inputs has its columns multiplied by it, and so has `dequantize()`.

    `dequantize()` is the specification that formats, kernels and exporters are tested against.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    g_idx: Tensor | None
    scheme: QuantScheme
    global_scale: Tensor | None = None
    input_scale: Tensor | None = None
    outliers: OutlierColumns | None = None
    global_factor: Tensor | None = None
    input_factor: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def inputs(self) -> InputQuantization | None:
        """How the linear's inputs are quantized, None when they are not."""
        if self.scheme.activation is None:
            return None
        columns = None if self.outliers is None else self.outliers.columns
        return InputQuantization(
            self.scheme.activation, self.input_scale, columns, self.input_factor
        )

    def column_groups(self) -> Tensor:
        """Scale group of every column: int64 [K]."""
        if self.g_idx is not None:
            return self.g_idx.long()
        k = self.codes.shape[1]
        return torch.arange(k, device=self.scale.device) // self.scheme.columns_per_scale(k)

    def steps(self) -> Tensor:
        """What one code is worth: fp32 [N, K] or [1, K], global scale included."""
        scale = self.scale.float()
        if self.global_scale is not None:
            scale = scale / self.global_scale
        if self.global_factor is not None:
            scale = scale * self.global_factor
        rows = self.scheme.rows_per_scale(self.codes.shape[0])
        if self.scheme.granularity == "block":
            scale = scale.repeat_interleave(rows, dim=0)[: self.codes.shape[0]]
        return scale[:, self.column_groups()]

    def part(self, rows: slice) -> "QuantizedTensor":
        """Some rows of the weight. rows: from one to another; squares that share a scale stay
        whole."""
        cells, outliers = slice(None), self.outliers
        if self.scheme.granularity != "tensor":
            height = self.scheme.rows_per_scale(self.shape[0])
            cells = slice(rows.start // height, -(-rows.stop // height))
        return replace(
            self,
            codes=self.codes[rows],
            scale=self.scale[cells],
            zero=None if self.zero is None else self.zero[cells],
            outliers=outliers and OutlierColumns(outliers.columns, outliers.weight[rows]),
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(code - zero) * scale in fp32, outlier columns in place, columns times their input
        factor, then rounded once to `dtype`: [N, K]."""
        values = self.codes.float()
        if self.zero is not None:
            values -= self.zero.float()[:, self.column_groups()]
        values *= self.steps()
        if self.outliers is not None:
            values[:, self.outliers.columns] = self.outliers.weight.float()
        if self.input_factor is not None:
            values *= self.input_factor.float()
        return values.to(dtype)


def is_trivial(g_idx: Tensor, scheme: QuantScheme) -> bool:
    """Whether a g_idx [K] says of every column that it is in the group of its place, or nothing
    (-1)."""
    k = g_idx.numel()
    usual = torch.arange(k) // scheme.columns_per_scale(k)
    flat = g_idx.reshape(-1).long()
    return bool(torch.equal(flat, usual) or (flat == -1).all())
