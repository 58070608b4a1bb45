"""The forms, in order of preference: a weight takes the first that has nothing against it.

A form is a file beside this one and a row here. What is left over takes the last row, which
refuses nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from compress.quant.blocks import BlockTensor
from compress.quant.tensor import QuantizedTensor
from compress.runtime.forms.block_panels import BlockPanelsForm, DecodedBlocks
from compress.runtime.forms.decoded import DecodedOnce
from compress.runtime.forms.dense import DenseForm
from compress.runtime.forms.form import Arithmetic, LinearFacts, LinearForm, LinearWeight
from compress.runtime.forms.packed import DecodedTiles
from compress.runtime.forms.panels import PanelsForm

# Of quantized weights, of those in GGUF's blocks, and of dense ones.
CODED: tuple[LinearForm[QuantizedTensor], ...] = (PanelsForm(), DecodedOnce(), DecodedTiles())
BLOCKED: tuple[LinearForm[BlockTensor], ...] = (BlockPanelsForm(), DecodedBlocks())
DENSE: tuple[LinearForm[Tensor], ...] = (DenseForm(),)

Source = TypeVar("Source")


@dataclass(frozen=True, slots=True)
class ChosenForm(Generic[Source]):
    """refused: name and reason of each row that stands before the form."""

    form: LinearForm[Source]
    refused: tuple[tuple[str, str], ...]


def choose(
    table: Sequence[LinearForm[Source]], facts: LinearFacts, how: Arithmetic
) -> ChosenForm[Source]:
    """The first row of a table that takes the weight."""
    refused: list[tuple[str, str]] = []
    for form in table:
        reason = form.why_not(facts, how)
        if reason is None:
            return ChosenForm(form, tuple(refused))
        refused.append((form.name, reason))
    raise AssertionError("the last row takes every weight")


def chosen_form(
    facts: LinearFacts, how: Arithmetic
) -> ChosenForm[Tensor] | ChosenForm[QuantizedTensor] | ChosenForm[BlockTensor]:
    """Of the table that is for such a weight. Nothing is read."""
    if facts.blocks is not None:
        return choose(BLOCKED, facts, how)
    if facts.scheme is None:
        return choose(DENSE, facts, how)
    return choose(CODED, facts, how)


def why_no_products(facts: LinearFacts, how: Arithmetic) -> str | None:
    """Why no product reads a weight's codes as they are; None where one does."""
    form = CODED[0] if facts.blocks is None else BLOCKED[0]
    return form.why_not(facts, how)


def in_panels(facts: LinearFacts, how: Arithmetic) -> bool:
    """Whether codes stay codes that products read."""
    return facts.coded and why_no_products(facts, how) is None


def pack_dense(weight: Tensor, facts: LinearFacts, how: Arithmetic) -> LinearWeight:
    """weight: [N, K], in any dtype."""
    return choose(DENSE, facts, how).form.pack(weight, facts, how)


def pack_blocks(weight: BlockTensor, facts: LinearFacts, how: Arithmetic) -> LinearWeight:
    """facts: of the whole weight; `weight` may be some rows of it."""
    return choose(BLOCKED, facts, how).form.pack(weight, facts, how)


def pack_codes(weight: QuantizedTensor, facts: LinearFacts, how: Arithmetic) -> LinearWeight:
    """facts: of the whole weight; `weight` may be some rows of it."""
    return choose(CODED, facts, how).form.pack(weight, facts, how)
