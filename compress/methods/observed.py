"""What a method asks to see of the inputs of its layers, and what it was shown."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from compress.quant.scheme import QuantScheme

Experts = Literal["all", "routed"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a method needs of a run under the options of its stage.

    hessian: the mean of x xᵀ. magnitudes: the largest and mean magnitude of every column.
    sequential: each input observed behind the already quantized layers of its block.
    experts: "all" shows every token to every expert, "routed" only those its router sends; None
        where the method has no say, and only what the scheme fixes beforehand counts.
    g_idx: a place in the file for the group of every column.
    pairs: between which modules it scales channels, if it does: "norms" leaves linears alone.
    """

    hessian: bool = False
    magnitudes: bool = False
    sequential: bool = False
    experts: Experts | None = None
    g_idx: bool = False
    pairs: Literal["norms", "all"] = "all"

    @property
    def data(self) -> bool:
        """Whether the method itself must see activations."""
        return self.hessian or self.magnitudes


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """What calibration showed of the input, of width K, that layers share; nothing without it.

    hessian: fp32 [K, K], mean of x xᵀ, undamped. absmax: fp32 [K], largest magnitude of every
    column. expert_tokens: tokens behind both where the layers are an expert's, which may have seen
    few or none; None for dense layers.
    """

    hessian: Tensor | None = None
    absmax: Tensor | None = None
    expert_tokens: int | None = None

    @property
    def nothing(self) -> bool:
        """Whether the layers are those of an expert that no token reached."""
        return self.expert_tokens == 0

    @property
    def driven(self) -> Tensor | None:
        """The Hessian fp32 [K, K], but for an expert that no token reached: its columns count
        alike."""
        return None if self.nothing else self.hessian


UNOBSERVED = Observed()


def fixes_inputs(scheme: QuantScheme | None) -> bool:
    """Whether a scheme has a scale or columns of the inputs that calibration fixes."""
    inputs = None if scheme is None else scheme.activation
    return inputs is not None and (not inputs.dynamic or inputs.outliers == "calibrated")
