"""Rows as codes of few bits give them back, in plain torch."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from compress_kernels.rounding import CodeRounding

E4M3_MAX = 448.0


def through_codes(x: Tensor, rounding: CodeRounding) -> Tensor:
    """As through_codes.through_codes, arguments checked."""
    if x.numel() == 0:
        return x.clone()
    if rounding.codes == "llm.int8":
        return _beside_outliers(x, rounding)
    if rounding.scale is not None:
        return _rounded(x, torch.tensor(rounding.scale, dtype=x.dtype, device=x.device), rounding)
    rows, columns = x.shape
    group = rounding.group or columns
    groups = pad(x, (0, -columns % group)).view(rows, -1, group)
    scale = groups.abs().amax(-1, keepdim=True) / rounding.largest
    scale = torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)
    return _rounded(groups, scale, rounding).flatten(1)[:, :columns]


def _beside_outliers(x: Tensor, rounding: CodeRounding) -> Tensor:
    seen = x.half()
    kept = seen.abs() >= rounding.threshold
    usual = seen.float().masked_fill(kept, 0)
    largest = usual.abs().amax(1, keepdim=True)
    largest = torch.where(largest == 0, 1.0, largest)
    codes = (usual * (rounding.largest / largest)).round()
    return torch.where(kept, x, (codes * (largest / rounding.largest)).to(x.dtype))


def _rounded(x: Tensor, scale: Tensor, rounding: CodeRounding) -> Tensor:
    if rounding.codes == "e4m3":
        codes = (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)
    else:
        low, high = -(rounding.largest + 0.5), rounding.largest - 0.5
        codes = (x / scale).clamp(low, high).round()
    return codes * scale
