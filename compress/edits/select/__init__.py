"""The table of selections: which groups of channels stay. Each is one paper, one file, one row."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from compress.edits.select import activation, contribution, fluctuation, magnitude, obs, taylor
from compress.edits.select.evidence import Evidence, Want
from compress.edits.select.groups import Groups

Choose = Callable[[Evidence, Groups, int], Tensor]


@dataclass(frozen=True, slots=True)
class Criterion:
    """A row of SELECTIONS.

    choose: the groups that stay, int64 [keep] ascending, from what was seen of a linear. wants:
    what must be seen beside weights. summary: one line.
    """

    choose: Choose
    wants: frozenset[Want]
    summary: str


SELECTIONS: Mapping[str, Criterion] = MappingProxyType(
    {
        "obs": Criterion(
            obs.choose,
            frozenset({"moments"}),
            "removes one by one what the best refit of the rest can best do without",
        ),
        "activation": Criterion(
            activation.choose,
            frozenset({"sequences"}),
            "keeps the largest activations (Minitron)",
        ),
        "contribution": Criterion(
            contribution.choose,
            frozenset({"moments"}),
            "keeps what gives most to the output",
        ),
        "taylor": Criterion(
            taylor.choose,
            frozenset({"gradients"}),
            "keeps what the loss would miss most, to first order (LLM-Pruner)",
        ),
        "magnitude": Criterion(
            magnitude.choose,
            frozenset({"producers"}),
            "keeps the largest weights",
        ),
        "fluctuation": Criterion(
            fluctuation.choose,
            frozenset({"moments"}),
            "keeps what varies most, as seen in the output (FLAP)",
        ),
    }
)
