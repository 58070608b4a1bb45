"""Rounding behind a scaling method where no other stage rounds: to nearest, by kind of scheme."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compress.methods import fp8, llm_int8, nvfp4, rtn
from compress.methods.fp8 import Fp8Config
from compress.methods.llm_int8 import LlmInt8Config
from compress.methods.nvfp4 import Nvfp4Config
from compress.methods.outcome import Outcome
from compress.methods.rtn import GroupSearch, RtnConfig, ScaleSearch
from compress.quant.scheme import QuantScheme, Signs


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
    config: object,
    *,
    scale_dtype: torch.dtype,
    hessian: Tensor | None = None,
    expert_tokens: int | None = None,
    absmax: Tensor | None = None,
) -> list[Outcome]:
    """Nearest codes for layers [N_i, K] that share an input, under a scheme of any kind.

    config: of the scaling stage; its `scale_search`, or "importance" where it has none, and its
    `signs`. Floats have no search "output" and take "importance" for it.
    """
    search: GroupSearch = getattr(config, "scale_search", "importance")
    signs: Signs = getattr(config, "signs", "auto")
    floats: ScaleSearch = "importance" if search == "output" else search
    seen: dict[str, Any] = {
        "scale_dtype": scale_dtype,
        "hessian": hessian,
        "expert_tokens": expert_tokens,
        "absmax": absmax,
    }
    if scheme.is_fp4:
        return nvfp4.quantize(weights, scheme, Nvfp4Config(floats), **seen)
    if scheme.type == "float":
        return fp8.quantize(weights, scheme, Fp8Config(floats), **seen)
    if scheme.activation is not None and scheme.activation.outliers != "none":
        return llm_int8.quantize(weights, scheme, LlmInt8Config(), **seen)
    return rtn.quantize(weights, scheme, RtnConfig(search, signs), **seen)
