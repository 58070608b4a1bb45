"""What products with codes may round: settled before an engine opens, and told of one that is."""

from collections.abc import Iterator
from typing import get_args

import torch

from compress.arch.forward.forward import describe_forward
from compress.errors import CheckpointError, RequestError
from compress.formats.weights import Weights
from compress.runtime.decoder.linear import facts_of, multiplied
from compress.runtime.forms.form import Arithmetic, LinearFacts
from compress.runtime.forms.panels import math_of
from compress.runtime.forms.table import in_panels, why_no_products
from compress_kernels.blocks.layouts import LAYOUTS
from compress_kernels.panels import WIDTHS, Math

USUAL: Math = "int16"
NO_WHOLE = "weights and rounded inputs are neither whole numbers nor both of them 8-bit floats"


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
    coded = [x for x in _facts(weights) if x.coded]
    reasons = [why_no_products(facts, how) for facts in coded]
    taken = [x for x, reason in zip(coded, reasons, strict=True) if reason is None]
    if any(_math_of(facts, how) != "exact" for facts in taken):
        return math
    if asked is None:
        return "exact"
    nothing = NO_WHOLE if taken else "its weights are not stored as codes"
    reason = next((x for x in reasons if x is not None), nothing)
    raise RequestError(
        f"math is {asked}, and {weights.checkpoint.path} has no products for it:"
        f" {reason}; leave math out, or take exact"
    )


def taken_maths(
    weights: Weights, dtype: torch.dtype, device: torch.device | str
) -> tuple[Math, ...]:
    """Every math that an engine may open with. Nothing is read."""
    found: list[Math] = []
    for math in get_args(Math):
        try:
            found.append(settled_math(weights, math, dtype, device))
        except RequestError:
            continue
    return tuple(found)


def math_notices(weights: Weights, how: Arithmetic) -> tuple[str, ...]:
    """What an engine rounds, and which codes take more bits in memory than in the file."""
    found = [x for x in _facts(weights) if in_panels(x, how)]
    if not found:
        return ()
    widened: dict[tuple[int, int], int] = {}
    for facts in found:
        bits = _bits(facts)
        pair = bits, WIDTHS[bits]
        if pair[0] != pair[1]:
            widened[pair] = widened.get(pair, 0) + 1
    return (
        *_rounded([x for x in found if _math_of(x, how) != "exact"], how.math),
        *(
            f"codes of {bits} bits take {width} in memory ({_linears(count)})"
            for (bits, width), count in widened.items()
        ),
    )


def _rounded(found: list[LinearFacts], math: Math) -> Iterator[str]:
    """What is said of weights that are multiplied as codes."""
    schemes = [facts.scheme for facts in found if facts.scheme is not None]
    own = [scheme for scheme in schemes if scheme.activation is not None]
    floats = sum(scheme.type == "float" and not scheme.is_fp4 for scheme in own)
    if len(found) > len(own):
        yield (
            f"math {math}: inputs of {_linears(len(found) - len(own))} are rounded to"
            f" {math.removeprefix('int')} bits; exact rounds nothing"
        )
    if len(own) > floats:
        yield (
            f"math {math}: {_linears(len(own) - floats)} sum whole numbers, inputs rounded as their"
            " scheme says; exact sums the same in fp32"
        )
    if floats:
        yield (
            f"math {math}: {_linears(floats)} sum products of 8-bit floats, inputs rounded as their"
            " scheme says; exact rounds decoded weights, too"
        )


def _bits(facts: LinearFacts) -> int:
    """Of a code."""
    if facts.blocks is not None:
        return LAYOUTS[facts.blocks].bits
    assert facts.scheme is not None, "panels are of codes"
    return facts.scheme.bits


def _math_of(facts: LinearFacts, how: Arithmetic) -> Math:
    """Of products in panels: codes of blocks are whole, or levels that are."""
    if facts.scheme is None:
        return how.math
    return math_of(facts.scheme, facts.shape[1], how.math)


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
    yield from (facts_of(weights, spec) for spec in multiplied(weights))
    if weights.spec.tied:
        yield facts_of(weights, weights.spec.embedding_linear())
