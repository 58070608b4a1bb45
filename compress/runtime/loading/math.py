"""What products with codes may round: settled before an engine opens, and told of one that is."""

from collections.abc import Iterator
from typing import get_args

import torch

from compress.arch.forward.forward import describe_forward
from compress.errors import CheckpointError, RequestError
from compress.formats.weights import Weights
from compress.runtime.decoder.linear import facts_of, multiplied
from compress.runtime.forms.form import Arithmetic, LinearFacts
from compress.runtime.forms.panels import WIDTHS, PanelsForm
from compress.runtime.forms.table import chosen_form
from compress_kernels.panels import Math

USUAL: Math = "int16"


def settled_math(
    weights: Weights, asked: Math | None, dtype: torch.dtype, device: torch.device | str
) -> Math:
    """The math that an engine opens with. Nothing is read.

    asked: None for int16 where weights are whole codes and products in fp32 on the CPU, else exact.
    Errors: RequestError for int16 or int8 where nothing would be rounded so.
    """
    if asked is not None and asked not in get_args(Math):
        raise RequestError(f"math is {asked!r}; it is one of {', '.join(get_args(Math))}")
    math: Math = USUAL if asked is None else asked
    if math == "exact":
        return math
    how = Arithmetic.here(dtype, device, math)
    unknown = _in_transformers(weights)
    if unknown is not None:
        if asked is None:
            return "exact"
        raise RequestError(f"math is {asked}, and transformers computes here: {unknown}")
    form, coded = PanelsForm(), [x for x in _facts(weights) if x.scheme is not None]
    reasons = [form.why_not(facts, how) for facts in coded]
    if None in reasons:
        return math
    if asked is None:
        return "exact"
    reason = next((x for x in reasons if x is not None), "its weights are not stored as codes")
    raise RequestError(
        f"math is {asked}, and {weights.checkpoint.path} has no products for it:"
        f" {reason}; leave math out, or take exact"
    )


def math_notices(weights: Weights, how: Arithmetic) -> tuple[str, ...]:
    """What an engine rounds, and which codes take more bits in memory than in the file."""
    found = [x for x in _facts(weights) if isinstance(chosen_form(x, how).form, PanelsForm)]
    if not found:
        return ()
    widened: dict[tuple[int, int], int] = {}
    for facts in found:
        assert facts.scheme is not None, "panels are of codes"
        pair = facts.scheme.bits, WIDTHS[facts.scheme.bits]
        if pair[0] != pair[1]:
            widened[pair] = widened.get(pair, 0) + 1
    rounded = (
        f"math {how.math}: inputs of {_linears(len(found))} are rounded to"
        f" {how.math.removeprefix('int')} bits; exact rounds nothing"
    )
    return (
        *((rounded,) if how.math != "exact" else ()),
        *(
            f"codes of {bits} bits take {width} in memory ({_linears(count)})"
            for (bits, width), count in widened.items()
        ),
    )


def _in_transformers(weights: Weights) -> str | None:
    """Why no decoder of ours runs the model; None where one does."""
    try:
        describe_forward(weights.checkpoint.config, weights.spec)
    except CheckpointError as error:
        return str(error).split(";")[0]
    return None


def _linears(count: int) -> str:
    return f"{count} linear{'s' * (count > 1)}"


def _facts(weights: Weights) -> Iterator[LinearFacts]:
    return (facts_of(weights, spec) for spec in multiplied(weights))
