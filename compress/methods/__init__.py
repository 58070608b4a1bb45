"""The methods a recipe stage can name: one paper, one file, one row here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from compress.methods import gptq, rtn
from compress.methods.gptq import GptqConfig
from compress.methods.outcome import Outcome
from compress.methods.rtn import RtnConfig


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table.

    config: dataclass of the options that a recipe stage may set.
    needs_calibration: of a config, whether it must see activations (else tensors stream through
        and no module is built).
    quantize: (weights [N_i, K] that share an input, scheme, config, *, scale_dtype, hessian,
        expert_tokens) -> an Outcome for each.
    summary: one line for `compress-model recipes` and the docs.
    """

    config: type
    needs_calibration: Callable[[Any], bool]
    quantize: Callable[..., list[Outcome]]
    summary: str


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "rtn": Method(
            RtnConfig,
            rtn.needs_calibration,
            rtn.quantize,
            "round to nearest with a scale search; needs no data",
        ),
        "gptq": Method(
            GptqConfig,
            lambda config: True,
            gptq.quantize,
            "error-compensated rounding after one Hessian a shared input",
        ),
    }
)
