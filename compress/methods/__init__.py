"""The methods a recipe stage can name: one paper, one file, one row here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from compress.methods import awq, fp8, gptq, llm_int8, nvfp4, plain, rtn, smoothquant
from compress.methods.awq import AwqConfig
from compress.methods.folding import FoldChoice
from compress.methods.fp8 import Fp8Config
from compress.methods.gptq import GptqConfig
from compress.methods.llm_int8 import LlmInt8Config
from compress.methods.nvfp4 import Nvfp4Config
from compress.methods.outcome import Outcome
from compress.methods.rtn import RtnConfig
from compress.methods.smoothquant import SmoothQuantConfig
from compress.quant.scheme import QuantScheme


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table.

    config: dataclass of the options that a recipe stage may set.
    observes: of a config, whether the method itself must see activations.
    quantize: (weights [N_i, K] that share an input, scheme, config, *, scale_dtype, hessian,
        expert_tokens, absmax) -> an Outcome for each.
    summary: one line for `compress-model recipes` and the docs.
    why_not: why a scheme is not for this method, and which one takes it; None when it is.
    fold: for a method that scales channels before they are rounded: (PairView, config) -> what it
        chose for the pair.
    """

    config: type
    observes: Callable[[Any], bool]
    quantize: Callable[..., list[Outcome]]
    summary: str
    why_not: Callable[[QuantScheme], str | None]
    fold: Callable[..., FoldChoice] | None = None

    def needs_calibration(self, config: Any, scheme: QuantScheme | None) -> bool:
        """Whether a stage must see activations, for its method or for what its scheme fixes
        beforehand (else tensors stream through and no module is built)."""
        inputs = None if scheme is None else scheme.activation
        fixed = inputs is not None and (not inputs.dynamic or inputs.outliers == "calibrated")
        return fixed or self.observes(config)


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "rtn": Method(
            RtnConfig,
            rtn.needs_calibration,
            rtn.quantize,
            "round to nearest with a scale search; needs no data",
            rtn.why_not,
        ),
        "gptq": Method(
            GptqConfig,
            lambda config: True,
            gptq.quantize,
            "error-compensated rounding after one Hessian a shared input",
            rtn.why_not,
        ),
        "fp8": Method(
            Fp8Config,
            fp8.observes,
            fp8.quantize,
            "8-bit floats (E4M3) with scales a tensor, a row, a group or a block",
            fp8.why_not,
        ),
        "nvfp4": Method(
            Nvfp4Config,
            nvfp4.observes,
            nvfp4.quantize,
            "4-bit floats (E2M1) in groups of 16 with E4M3 scales",
            nvfp4.why_not,
        ),
        "awq": Method(
            AwqConfig,
            lambda config: True,
            plain.quantize,
            "scales channels by their activations before this or a later stage rounds",
            plain.why_not,
            awq.search,
        ),
        "smoothquant": Method(
            SmoothQuantConfig,
            lambda config: True,
            plain.quantize,
            "moves outliers of the inputs into the weights before both are rounded",
            plain.why_not,
            smoothquant.search,
        ),
        "llm_int8": Method(
            LlmInt8Config,
            lambda config: False,
            llm_int8.quantize,
            "8-bit weights and inputs, 16 bit for the input columns that are outliers",
            llm_int8.why_not,
        ),
    }
)
