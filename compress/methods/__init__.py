"""The methods a recipe stage can name: one paper, one file, one row here."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from compress.methods.gptq import GptqConfig
from compress.methods.rtn import RtnConfig


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table.

    config: dataclass of the options that a recipe stage may set.
    needs_calibration: whether it must see activations (else it streams tensors, no modules).
    summary: one line for `compress-model recipes` and the docs.
    """

    config: type
    needs_calibration: bool
    summary: str


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "rtn": Method(RtnConfig, False, "round to nearest with a scale search; needs no data"),
        "gptq": Method(GptqConfig, True, "GPTQ: error-compensated rounding from one Hessian"),
    }
)
