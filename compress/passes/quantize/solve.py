"""Solving the layers of one observed block, and putting the results where they belong."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

from compress.blocks.linear import set_linear_weight
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.formats import FORMATS
from compress.methods import METHODS
from compress.methods.observed import Observed
from compress.methods.outcome import Outcome
from compress.passes.context import PassContext, layer_record, read_weight, store
from compress.passes.quantize.observe import (
    BlockPass,
    by_input,
    is_sequential,
    observation_rounds,
    observe,
)
from compress.passes.quantize.scale import Scaled
from compress.passes.ranks import dealt
from compress.plan.layers import ModulePlan
from compress.plan.output_format import scale_dtype
from compress.quant.activations import quantize_inputs
from compress.quant.inputs import static_scale
from compress.quant.tensor import QuantizedTensor
from compress.report.schema import Layer
from compress_calibration.hessian import InputStats

UNSCALED = "no token reached the expert: its input scale is 1"
UNKNOWN = "no token reached the expert: its channels are scaled without knowing its inputs"
Solved = tuple[QuantizedTensor, Layer]


@dataclass(frozen=True, slots=True, eq=False)
class SolveGroup:
    """Layers that a method is given together. last: whether no other group reads that input."""

    key: str
    members: list[ModulePlan]
    last: bool


def solve_block(block: BlockPass, modules: list[ModulePlan], scaled: Scaled) -> Iterator[Layer]:
    """Observe and solve round by round, and write what comes out.

    New weights take their place in the block after the last round, or after each one where a stage
    is sequential. What `scaled` has observed already is not observed again.
    """
    work = block.work
    waiting: list[tuple[ModulePlan, QuantizedTensor]] = []
    rounds = observation_rounds(work, modules)
    for members in rounds:
        stats = scaled.stats or observe(block, members)
        last = members is rounds[-1] or is_sequential(work, modules)
        groups = _groups(work, members)
        solutions = dealt(work.ranks, groups, partial(_solve, work, stats, scaled))
        for group, solved in zip(groups, solutions, strict=True):
            for m, (quantized, layer) in zip(group.members, solved, strict=True):
                waiting.append((m, quantized))
                while last and waiting:
                    _put_in_place(work, block.module, *waiting.pop())
                yield layer


def _put_in_place(
    work: PassContext, module: nn.Module, m: ModulePlan, quantized: QuantizedTensor
) -> None:
    """From here on the block computes with what the result will hold."""
    set_linear_weight(module, m.linear, quantized.dequantize(work.dtype))
    inputs = quantized.inputs()
    if inputs is not None and FORMATS[work.plan.format].coded:
        quantize_inputs(module.get_submodule(m.linear.module), inputs)


def _groups(work: PassContext, modules: list[ModulePlan]) -> list[SolveGroup]:
    """The layers of one shared input after those of another. Together are those of one stage and
    scheme whose weights are stored in one dtype, which is that of their scales; and of those only
    what runtimes merge, where the scheme has a number for all of it."""

    def alike(m: ModulePlan) -> tuple[int, str, str, str]:
        # NVFP4's numbers have dtypes of their own.
        stored = "" if m.scheme.is_fp4 else work.checkpoint.tensors[m.linear.tensor].dtype
        merged = f"{m.linear.fused or m.linear.name} {m.linear.expert}"
        return m.stage, m.scheme.describe(), stored, merged if m.scheme.spans_merged else ""

    groups = []
    for key, members in by_input(modules):
        same = [list(found) for _, found in groupby(sorted(members, key=alike), key=alike)]
        groups += [SolveGroup(key, found, found is same[-1]) for found in same]
    return groups


def _solve(
    work: PassContext, stats: dict[str, InputStats], scaled: Scaled, group: SolveGroup
) -> list[Solved]:
    """Quantize a group's layers and write them. What was seen of the input goes with the last of
    the groups that read it: the Hessians of a block are most of the memory."""
    seen = stats.pop(group.key) if group.last else stats[group.key]
    first, stage = group.members[0], work.plan.recipe.stages[group.members[0].stage]
    stored = TORCH_DTYPES[work.checkpoint.tensors[first.linear.tensor].dtype]
    dtype = scale_dtype(work.plan.format, stored)
    is_expert = first.linear.expert is not None
    outcomes = METHODS[stage.method].by_layer(
        [_weight(work, m, scaled) for m in group.members],
        first.scheme,
        stage.config,
        scale_dtype=dtype,
        observed=Observed(seen.hessian, seen.absmax, seen.tokens if is_expert else None),
    )
    return [
        write_solved(work, m, outcome, seen, dtype, scaled.notes_of(m))
        for m, outcome in zip(group.members, outcomes, strict=True)
    ]


def write_solved(
    work: PassContext,
    m: ModulePlan,
    outcome: Outcome,
    stats: InputStats,
    dtype: torch.dtype,
    folds: tuple[str, ...] = (),
) -> tuple[QuantizedTensor, Layer]:
    """Write what a method made of a layer, with the scale of its inputs; and the report's line.

    dtype: of stored scales. folds: remarks on the scaling of the layer's columns.
    """
    quantized = _with_input_scale(outcome.quantized, stats, dtype)
    beyond = store(work, m, quantized)
    told = replace(outcome, kept=_unscaled(m, stats) or outcome.kept or _unknown(m, stats))
    return quantized, layer_record(m, told, tokens=stats.tokens, beyond=beyond, folds=folds)


def _weight(work: PassContext, m: ModulePlan, scaled: Scaled) -> Tensor:
    """[N, K], in fp32 where folds change it, else as stored: together the layers are large."""
    weight = read_weight(work, m).to(work.device)
    tensor = m.linear.tensor
    return scaled.folds.weight(tensor, weight) if scaled.folds.touches(tensor) else weight


def _unscaled(m: ModulePlan, stats: InputStats) -> str | None:
    """What the report says of a static scale that nothing was seen for."""
    activation = m.scheme.activation
    static = activation is not None and not activation.dynamic
    return UNSCALED if static and stats.tokens == 0 else None


def _unknown(m: ModulePlan, stats: InputStats) -> str | None:
    """What the report says of an expert that was scaled and that nothing was seen of, where the
    rounding itself needs no data."""
    return UNKNOWN if m.folds and m.linear.expert is not None and stats.tokens == 0 else None


def _with_input_scale(
    quantized: QuantizedTensor, stats: InputStats, dtype: torch.dtype
) -> QuantizedTensor:
    activation = quantized.scheme.activation
    if activation is None or activation.dynamic:
        return quantized
    assert stats.absmax is not None, "observe keeps magnitudes for static schemes"
    return replace(quantized, input_scale=static_scale(stats.absmax, activation, dtype))
