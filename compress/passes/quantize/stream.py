"""The data-free pass: tensors go through one by one, no module is ever built."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch

from compress.events import Event
from compress.methods import METHODS
from compress.methods.outcome import Outcome
from compress.passes.context import (
    PassContext,
    block_tensors,
    copy_tensors,
    finish_unit,
    layer_record,
    outside_tensors,
    read_in_rows,
    read_weight,
    store,
)
from compress.passes.ranks import dealt
from compress.passes.units import HEAD, OUTSIDE, block_unit, shown
from compress.plan.layers import ModulePlan
from compress.plan.output_format import scale_dtype
from compress.plan.plan import Plan
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import QuantizedTensor
from compress.report.schema import Layer

# The outcome of a run of a layer's rows, and their energy, which its error is a share of.
WeighedOutcome = tuple[Outcome, float]


def units(plan: Plan) -> list[tuple[str, int | None, list[str]]]:
    """(name, block, source tensors) of everything the pass works off, in order."""
    blocks, head = plan.spec.blocks, plan.head
    return [
        (OUTSIDE, None, outside_tensors(plan)),
        *((block_unit(b.index), b.index, block_tensors(b)) for b in blocks),
        *([] if head is None else [(HEAD, None, [head.linear.tensor])]),
    ]


def run(work: PassContext) -> None:
    """Quantize every planned tensor by itself and copy the rest; finished units are skipped."""
    todo = units(work.plan)
    for position, (unit, block, sources) in enumerate(todo):
        if unit in work.journal.units:
            continue
        began = time.perf_counter()
        stream_unit(work, unit, block, sources)
        spent = time.perf_counter() - began
        work.progress(Event("quantize", shown(unit), position + 1, len(todo), spent))


def stream_unit(work: PassContext, unit: str, block: int | None, sources: list[str]) -> None:
    """One unit: round what is planned, copy what is not, flush, record."""
    planned = work.planned(block)
    layers: dict[str, Layer] = {}
    for made in dealt(work.ranks, _together(work, sources, planned), partial(_stream, work)):
        layers |= made
    finish_unit(work, unit, sources, [layers[name] for name in sources if name in layers])


def _together(
    work: PassContext, sources: list[str], planned: dict[str, ModulePlan]
) -> list[str | list[ModulePlan]]:
    """What goes through together, in order: a tensor to copy, or linears to round."""
    pieces: list[str | list[ModulePlan]] = []
    merged: set[str] = set()
    for name in (name for name in sources if name not in merged):
        if name not in planned:
            pieces.append(name)
        elif planned[name].scheme.spans_merged:
            whole = merged_with(work, planned[name], planned.values())
            pieces.append(whole)
            merged |= {m.linear.tensor for m in whole}
        else:
            pieces.append([planned[name]])
    return pieces


def _stream(work: PassContext, piece: str | list[ModulePlan]) -> dict[str, Layer]:
    """Copy or round and write; the lines of what was rounded, by tensor."""
    if isinstance(piece, str):
        copy_tensors(work, [piece])
        return {}
    if piece[0].scheme.spans_merged:
        return round_merged(work, piece)
    return {piece[0].linear.tensor: round_one(work, piece[0])}


def round_one(work: PassContext, module: ModulePlan) -> Layer:
    """Quantize one linear by itself, in runs of rows; runs do not depend on each other."""
    whole = join_runs(_rounded_runs(work, module), module.scheme)
    store(work, module, whole.quantized)
    return layer_record(module, whole)


def _rounded_runs(work: PassContext, module: ModulePlan) -> Iterator[WeighedOutcome]:
    stage = work.plan.recipe.stages[module.stage]
    for stored in read_in_rows(work, module):
        rows = stored.float()
        (outcome,) = METHODS[stage.method].by_layer(
            [rows],
            module.scheme,
            stage.config,
            scale_dtype=scale_dtype(work.plan.format, stored.dtype),
        )
        yield outcome, float(rows.square().sum(dtype=torch.float64))


def merged_with(
    work: PassContext, module: ModulePlan, planned: Iterable[ModulePlan]
) -> list[ModulePlan]:
    """A linear and those that runtimes merge into one matrix with it, of the same block, as far as
    they are stored in one dtype: that of a scale for all. NVFP4's numbers have dtypes of their own.
    """
    if module.linear.fused is None:
        return [module]

    def key(m: ModulePlan) -> tuple[str | None, int | None, str]:
        stored = "" if m.scheme.is_fp4 else work.checkpoint.tensors[m.linear.tensor].dtype
        return m.linear.fused, m.linear.expert, stored

    return [m for m in planned if key(m) == key(module)]


def round_merged(work: PassContext, modules: list[ModulePlan]) -> dict[str, Layer]:
    """Quantize linears as wholes, together, for a scheme that has one number for all of them."""
    stage = work.plan.recipe.stages[modules[0].stage]
    weights = [read_weight(work, m) for m in modules]
    dtype = scale_dtype(work.plan.format, weights[0].dtype)
    outcomes = METHODS[stage.method].by_layer(
        weights, modules[0].scheme, stage.config, scale_dtype=dtype
    )
    layers = {}
    for m, outcome in zip(modules, outcomes, strict=True):
        store(work, m, outcome.quantized)
        layers[m.linear.tensor] = layer_record(m, outcome)
    return layers


def join_runs(runs: Iterable[WeighedOutcome], scheme: QuantScheme) -> Outcome:
    """One outcome from those of a layer's runs of rows: its error is the share that all of them
    lose of their energy."""
    outcomes, cost, energy = [], 0.0, 0.0
    for outcome, whole in runs:
        cost, energy = cost + outcome.error * whole, energy + whole
        outcomes.append(outcome)
    quantized = _join_rows([x.quantized for x in outcomes], scheme)
    return replace(outcomes[0], quantized=quantized, error=cost / energy if energy > 0 else 0.0)


def _join_rows(pieces: list[QuantizedTensor], scheme: QuantScheme) -> QuantizedTensor:
    """One tensor from runs of its rows, which share their columns' groups and outliers."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    zeros = [p.zero for p in pieces if p.zero is not None]
    kept = [p.outliers.weight for p in pieces if p.outliers is not None]
    outliers = None
    if first.outliers is not None:
        outliers = replace(first.outliers, weight=torch.cat(kept))
    return QuantizedTensor(
        codes=torch.cat([p.codes for p in pieces]),
        scale=torch.cat([p.scale for p in pieces]),
        zero=torch.cat(zeros) if zeros else None,
        g_idx=first.g_idx,
        scheme=scheme,
        outliers=outliers,
    )
