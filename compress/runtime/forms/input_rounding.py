"""How inputs of linears are rounded, a row at a time: by products with whole codes themselves, or
before a product in fp32."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from compress.quant.activations import LLM_INT8_MAX, fake_quantize
from compress.quant.floats import E4M3_MAX
from compress.quant.scheme import ActivationScheme
from compress.quant.tensor import InputQuantization
from compress_kernels.ops.through_codes import through_codes
from compress_kernels.rounding import CodeRounding, FloatRounding, RowRounding


def rounds_rows(scheme: ActivationScheme) -> bool:
    """Whether a token has one scale for whole numbers."""
    return scheme.type == "int" and scheme.granularity != "group"


def row_rounding(inputs: InputQuantization) -> RowRounding:
    """What `fake_quantize` does to a token alone, of an fp32 one the same codes. Columns that
    calibration fixed are 0 in it by then."""
    scheme = inputs.scheme
    assert rounds_rows(scheme), "others have no row of theirs"
    if scheme.outliers == "dynamic":
        return RowRounding("outliers", LLM_INT8_MAX, threshold=_in_fp16(scheme.threshold))
    if scheme.outliers == "calibrated":
        return RowRounding("absmax", LLM_INT8_MAX)
    largest = ((1 << scheme.bits) - 1) / 2
    if scheme.dynamic:
        return RowRounding("token", largest)
    assert inputs.scale is not None, "a static scheme has a scale"
    return RowRounding("fixed", largest, scale=float(inputs.scale))


def rounds_floats(scheme: ActivationScheme) -> bool:
    """Whether a token's numbers become 8-bit floats."""
    return scheme.type == "float" and scheme.bits == 8 and scheme.outliers == "none"


def float_rounding(inputs: InputQuantization) -> FloatRounding:
    """What `fake_quantize` does to a token alone, of an fp32 one the same codes."""
    scheme = inputs.scheme
    assert rounds_floats(scheme), "others are rounded to whole numbers"
    if scheme.dynamic:
        return FloatRounding(scheme.group_size)
    assert inputs.scale is not None, "a static scheme has a scale"
    return FloatRounding(scale=float(inputs.scale))


def code_rounding(inputs: InputQuantization) -> CodeRounding | None:
    """What `fake_quantize` does to a token alone, as one op; None where columns that calibration
    fixed stay as they are, or factors come before."""
    scheme = inputs.scheme
    if scheme.outliers == "calibrated" or inputs.factor is not None:
        return None
    if scheme.outliers == "dynamic":
        return CodeRounding("llm.int8", LLM_INT8_MAX, threshold=_in_fp16(scheme.threshold))
    codes: Literal["e4m3", "int"] = "e4m3" if scheme.type == "float" else "int"
    largest = E4M3_MAX if codes == "e4m3" else ((1 << scheme.bits) - 1) / 2
    if scheme.dynamic:
        return CodeRounding(codes, largest, group=scheme.group_size)
    assert inputs.scale is not None, "a static scheme has a scale"
    return CodeRounding(codes, largest, scale=float(inputs.scale))


def rounded(x: Tensor, inputs: InputQuantization) -> Tensor:
    """x: [..., n] as `fake_quantize` rounds each of its tokens alone, to the bit."""
    rounding = code_rounding(inputs) if x.device.type == "cpu" else None
    if rounding is None or x.dtype == torch.float16:
        return fake_quantize(x, inputs, alone=True)
    return through_codes(x.reshape(-1, x.shape[-1]), rounding).view(x.shape)


def _in_fp16(threshold: float) -> float:
    """As it is compared with numbers of fp16."""
    return float(torch.tensor(threshold, dtype=torch.float16))


def rounded_alike(parts: Sequence[InputQuantization | None]) -> bool:
    """Whether linears that read one input read the same rounded one."""
    first, *others = parts
    if first is None:
        return all(other is None for other in others)
    given = [other for other in others if other is not None]
    own = [x for part in (first, *given) for x in (part.columns, part.factor)]
    alike = all(first.scheme == x.scheme and _equal(first.scale, x.scale) for x in given)
    return alike and len(given) == len(others) and all(x is None for x in own)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)
