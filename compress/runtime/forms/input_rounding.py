"""Which roundings of inputs products with whole codes do themselves, a row at a time."""

from collections.abc import Sequence

import torch

from compress.quant.activations import LLM_INT8_MAX
from compress.quant.scheme import ActivationScheme
from compress.quant.tensor import InputQuantization
from compress_kernels.rounding import RowRounding


def rounds_rows(scheme: ActivationScheme) -> bool:
    """Whether a token has one scale for whole numbers."""
    return scheme.type == "int" and scheme.granularity != "group"


def row_rounding(inputs: InputQuantization) -> RowRounding:
    """What `fake_quantize` does to a token alone, of an fp32 one the same codes. Columns that
    calibration fixed are 0 in it by then."""
    scheme = inputs.scheme
    assert rounds_rows(scheme), "others have no row of theirs"
    if scheme.outliers == "dynamic":
        threshold = float(torch.tensor(scheme.threshold, dtype=torch.float16))
        return RowRounding("outliers", LLM_INT8_MAX, threshold=threshold)
    if scheme.outliers == "calibrated":
        return RowRounding("absmax", LLM_INT8_MAX)
    largest = ((1 << scheme.bits) - 1) / 2
    if scheme.dynamic:
        return RowRounding("token", largest)
    assert inputs.scale is not None, "a static scheme has a scale"
    return RowRounding("fixed", largest, scale=float(inputs.scale))


def rounded_alike(parts: Sequence[InputQuantization | None]) -> bool:
    """Whether linears that read one input read the same rounded one."""
    schemes = {None if part is None else part.scheme for part in parts}
    own = [x for part in parts if part is not None for x in (part.scale, part.columns, part.factor)]
    return len(schemes) == 1 and all(x is None for x in own)
