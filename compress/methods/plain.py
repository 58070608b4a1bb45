"""Rounding behind a scaling method where no other stage rounds: to nearest, by kind of scheme."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from compress.methods import fp8, llm_int8, nvfp4, rtn
from compress.methods.fp8 import Fp8Config
from compress.methods.llm_int8 import LlmInt8Config
from compress.methods.nvfp4 import Nvfp4Config
from compress.methods.observed import UNOBSERVED, Observed
from compress.methods.outcome import Outcome
from compress.methods.rtn import GroupSearch, RtnConfig, ScaleSearch
from compress.quant.scheme import QuantScheme, Signs


class PlainOptions(Protocol):
    """What a scaling stage says of the rounding behind it."""

    @property
    def scale_search(self) -> GroupSearch: ...

    @property
    def signs(self) -> Signs: ...


def why_not(scheme: QuantScheme) -> str | None:
    """Why a scheme is not for the method that `quantize` takes for its kind, None when it is."""
    if scheme.is_fp4:
        return nvfp4.why_not(scheme)
    if scheme.type == "float":
        return fp8.why_not(scheme)
    if scheme.activation is not None and scheme.activation.outliers != "none":
        return llm_int8.why_not(scheme)
    return rtn.why_not(scheme)


def quantize(
    weights: Sequence[Tensor],
    scheme: QuantScheme,
    config: PlainOptions,
    *,
    scale_dtype: torch.dtype,
    observed: Observed = UNOBSERVED,
) -> list[Outcome]:
    """Nearest codes for layers [N_i, K] that share an input, under a scheme of any kind.

    Floats have no search "output" and take "importance" for it.
    """
    search = config.scale_search
    floats: ScaleSearch = "importance" if search == "output" else search
    if scheme.is_fp4:
        four = Nvfp4Config(floats)
        return nvfp4.quantize(weights, scheme, four, scale_dtype=scale_dtype, observed=observed)
    if scheme.type == "float":
        eight = Fp8Config(floats)
        return fp8.quantize(weights, scheme, eight, scale_dtype=scale_dtype, observed=observed)
    if scheme.activation is not None and scheme.activation.outliers != "none":
        none = LlmInt8Config()
        return llm_int8.quantize(weights, scheme, none, scale_dtype=scale_dtype, observed=observed)
    integers = RtnConfig(search, config.signs)
    return rtn.quantize(weights, scheme, integers, scale_dtype=scale_dtype, observed=observed)
