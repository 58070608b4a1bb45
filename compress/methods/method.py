"""A method as one value: what a row of METHODS must have, so that mypy checks a new one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from compress.methods.folding import FoldChoice, PairView
from compress.methods.observed import UNOBSERVED, Needs, Observed, fixes_inputs
from compress.methods.outcome import Outcome
from compress.quant.scheme import QuantScheme

Config = TypeVar("Config")
Options = TypeVar("Options", contravariant=True)


class Quantize(Protocol[Options]):
    """Rounds layers that share an input."""

    def __call__(
        self,
        weights: Sequence[Tensor],
        scheme: QuantScheme,
        config: Options,
        *,
        scale_dtype: torch.dtype,
        observed: Observed = UNOBSERVED,
    ) -> list[Outcome]:
        """An outcome for each of the weights [N_i, K], in fp32 or as they are stored.

        scale_dtype: of the scales, where the method chooses them in the dtype that is stored.
        """


class FoldSearch(Protocol[Options]):
    """Chooses how the channels of a pair are scaled before they are rounded."""

    def __call__(self, view: PairView, config: Options) -> FoldChoice: ...


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table; made by `row`, which checks that its functions go together.

    config: dataclass of the options that a recipe stage may set.
    quantize: as the protocol says; None for a method that rounds a whole model into one file
        (`whole`), whose stages have no scheme.
    summary: one line for `compress-model recipes` and the docs.
    why_not: why a scheme is not for this method, and which one takes it; None when it is.
    needs: what the method needs of a run under a config.
    fold: for a method that scales channels before they are rounded.
    """

    config: type
    quantize: Quantize[Any] | None
    summary: str
    why_not: Callable[[QuantScheme], str | None]
    needs: Callable[[Any], Needs]
    fold: FoldSearch[Any] | None

    @property
    def whole(self) -> bool:
        """Whether a stage is for all layers, each in a type that the stage's one says."""
        return self.quantize is None

    @property
    def by_layer(self) -> Quantize[Any]:
        """What rounds layers by a scheme."""
        assert self.quantize is not None, "a whole model is rounded by a pass of its own"
        return self.quantize

    def needs_calibration(self, config: Any, scheme: QuantScheme | None) -> bool:
        """Whether a stage must see activations, for its method or for what its scheme fixes
        beforehand (else tensors stream through and no module is built)."""
        return fixes_inputs(scheme) or self.needs(config).data


def row(
    config: type[Config],
    quantize: Quantize[Config],
    summary: str,
    *,
    why_not: Callable[[QuantScheme], str | None],
    needs: Callable[[Config], Needs],
    fold: FoldSearch[Config] | None = None,
) -> Method:
    """A row of METHODS. `Method` says what each is; here mypy holds all to one type of options."""
    return Method(config, quantize, summary, why_not, needs, fold)


def whole_row(config: type[Config], summary: str, *, needs: Callable[[Config], Needs]) -> Method:
    """The row of a method that rounds a whole model into one file."""
    return Method(config, None, summary, _no_scheme, needs, None)


def _no_scheme(scheme: QuantScheme) -> str:
    return "rounds to types of llama.cpp; take the scheme out and name one in type"
