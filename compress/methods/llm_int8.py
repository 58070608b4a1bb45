"""LLM.int8(): 8-bit weights and inputs, and 16 bit for the few input columns that are outliers.

Dettmers, Lewis, Belkada, Zettlemoyer: LLM.int8(): 8-bit Matrix Multiplication for Transformers at
Scale, arXiv 2208.07339. The products of a layer are split (eq. 8): columns O of the input that
reach a threshold are multiplied in 16 bit, the others as integers with one scale a token and one
a row of the weight. Here the weight's part is made:

    scale_n = max_k |w_nk| / 127,  code_nk = round(w_nk * (127 / max_k |w_nk|)), ties to even

over all columns, outliers or not, with bitsandbytes' arithmetic, so that its kernels can run what
is stored. Where the columns are "dynamic" the runtime finds them in the inputs of every call and
takes its weights for them from the codes. Where they are "calibrated" they are those that reached
the threshold on calibration data, and their weights are kept as they were.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.methods.observed import UNOBSERVED, Needs, Observed
from compress.methods.outcome import Outcome, judge
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import OutlierColumns, QuantizedTensor

LARGEST = 127.0  # code of the largest weight of a row; -128 is not used
UNSEEN = "no token reached the expert: none of its columns is known to be an outlier"


@dataclass(frozen=True, slots=True)
class LlmInt8Config:
    """Options of an `llm_int8` stage; the threshold is the scheme's.

    experts: "all" shows every token to every expert, "routed" only those its router sends. Of
        concern to calibrated columns only.
    """

    experts: Literal["all", "routed"] = "all"


def needs(config: LlmInt8Config) -> Needs:
    """Nothing by itself: calibrated columns are the scheme's."""
    return Needs(experts=config.experts)


def why_not(scheme: QuantScheme) -> str | None:
    """Why a scheme is not for LLM.int8(), None when it is."""
    inputs = scheme.activation
    if inputs is None or inputs.outliers == "none":
        return "keeps outlier columns of the inputs; use scheme LLM_INT8 or LLM_INT8_CALIBRATED"
    weight = (scheme.type, scheme.bits, scheme.granularity, scheme.symmetric)
    tokens = (inputs.type, inputs.bits, inputs.granularity, inputs.dynamic)
    if weight != ("int", 8, "channel", True) or tokens != ("int", 8, "token", True):
        return "has 8 bits, one scale a row and one a token; use LLM_INT8 or LLM_INT8_CALIBRATED"
    return None


def quantize(
    weights: Sequence[Tensor],
    scheme: QuantScheme,
    config: LlmInt8Config,
    *,
    scale_dtype: torch.dtype,
    observed: Observed = UNOBSERVED,
) -> list[Outcome]:
    """Quantize layers [N_i, K] that share an input.

    scale_dtype: of the source's weights, which outlier columns keep. observed: its Hessian is for
    the error alone; magnitudes are missing only for dynamic columns. The scales are fp32, as
    bitsandbytes stores them.
    """
    assert scheme.activation is not None, "`why_not` asks for quantized inputs"
    columns = None
    if scheme.activation.outliers == "calibrated":
        assert observed.absmax is not None, "a pass observes the inputs of calibrated schemes"
        columns = outlier_columns(observed.absmax, scheme.activation.threshold)
    outcomes = []
    for weight in weights:
        rows = weight.float()
        codes, scale = round_rows(rows)
        outliers = None
        if columns is not None:
            outliers = OutlierColumns(columns, rows[:, columns].to(scale_dtype).contiguous())
        q = QuantizedTensor(codes, scale, None, None, scheme, outliers=outliers)
        error = judge(rows, observed.driven).error(q.dequantize())
        kept = UNSEEN if observed.nothing and columns is not None else None
        found = None if columns is None else columns.numel()
        outcomes.append(Outcome(q, error, "llm_int8", kept, outlier_columns=found))
    return outcomes


def outlier_columns(absmax: Tensor, threshold: float) -> Tensor:
    """Columns that reach the threshold: int64 [O], ascending. absmax: [K]."""
    return (absmax >= threshold).nonzero().flatten()


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [N, K] and scales fp32 [N, 1] of weight fp32 [N, K], as bitsandbytes rounds.

    A scale is (row absmax) / 127 rounded once; 127 times that, rounded, divided by 127 and rounded
    is the same number again, so what is stored as absmax reads back exactly. That needs normal
    numbers: rows of zeros, and those with a smaller scale than fp32's least, count as if their
    absmax was 1.
    """
    absmax = weight.abs().amax(1, keepdim=True)  # absmax: [N, 1]
    normal = absmax / LARGEST >= torch.finfo(torch.float32).tiny
    absmax = torch.where(normal, absmax, torch.ones_like(absmax))
    codes = (weight * (LARGEST / absmax)).round().to(torch.int8)
    return codes, absmax / LARGEST
