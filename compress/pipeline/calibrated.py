"""The calibrated pass: block by block, load, observe, solve, write, run on, free.

A block is observed unquantized, on the inputs that the quantized blocks before it produce, so that
each layer also makes up for what its predecessors lost. Its outputs with the new weights become the
next block's inputs. Only one block, its Hessians and a batch of hidden states are in memory.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

from torch import Tensor, nn

from compress.arch.spec import BlockSpec
from compress.blocks.activation import quantize_inputs
from compress.blocks.linear import set_linear_weight
from compress.blocks.skeleton import BlockContext, Skeleton
from compress.formats import dense
from compress.methods import METHODS
from compress.pipeline import calibration
from compress.pipeline.events import Event
from compress.pipeline.journal import CALIBRATION
from compress.pipeline.modules import ModulePlan
from compress.pipeline.observing import (
    Batches,
    by_input,
    by_what_they_read,
    is_sequential,
    observation_rounds,
    observe,
)
from compress.pipeline.sizes import rows_at_once
from compress.pipeline.spill import HiddenStates
from compress.pipeline.stream import stream_unit
from compress.pipeline.work import (
    Work,
    block_tensors,
    copy_tensors,
    finish_unit,
    layer_record,
    outside_tensors,
    read_weight,
    store,
)
from compress.quant.tensor import QuantizedTensor
from compress.report.schema import Layer
from compress_calibration.hessian import Stats

EMBED = "embed"

Solved = tuple[ModulePlan, QuantizedTensor, Layer]


def calibrate(work: Work, folder: Path) -> None:
    """Quantize all blocks in order; units that the journal has are skipped."""
    config = work.plan.recipe.calibration
    assert config is not None, "the recipe parser asks for calibration where a stage needs it"
    spec = work.plan.spec
    if f"block {len(spec.blocks) - 1}" in work.journal.units:
        return
    skeleton = Skeleton(work.checkpoint.config, spec, dtype=work.dtype, device=work.device)
    if CALIBRATION not in work.journal.units:
        began = time.perf_counter()
        summary = calibration.prepare(config, work.weights, skeleton, folder)
        work.journal.record(CALIBRATION, summary)
        work.progress(Event("calibrate", "tokens", 1, 1, time.perf_counter() - began))
    ids, mask = calibration.reload(folder, work.journal.units[CALIBRATION]["sha256"])
    shape = (ids.shape[0], ids.shape[1], spec.hidden)
    spills = [HiddenStates(folder / f"hidden.{i}", shape, work.dtype) for i in (0, 1)]
    rows = rows_at_once(shape, work.dtype, config.spill_bytes)
    _all_units(work, Batches(ids, mask, skeleton, rows), spills)


def _all_units(work: Work, batches: Batches, spills: list[HiddenStates]) -> None:
    """Everything outside the blocks, the embedded tokens, then block after block."""
    blocks = work.plan.spec.blocks
    steps: list[tuple[str, Callable[[], None]]] = [
        ("outside", partial(stream_unit, work, "outside", None, outside_tensors(work))),
        (EMBED, partial(_embed, work, batches, spills[0])),
    ]
    for block in blocks:
        source, target = spills[block.index % 2], spills[(block.index + 1) % 2]
        onward = None if block is blocks[-1] else target
        steps.append(
            (f"block {block.index}", partial(_block, work, batches, block, source, onward))
        )
    for position, (unit, step) in enumerate(steps):
        if unit in work.journal.units:
            continue
        began = time.perf_counter()
        step()
        spent = time.perf_counter() - began
        work.progress(Event("quantize", unit, position + 1, len(steps), spent))


def _embed(work: Work, batches: Batches, target: HiddenStates) -> None:
    for start, stop in batches:
        mask = None if batches.mask is None else batches.mask[start:stop]
        hidden = batches.skeleton.embed(work.weights, batches.ids[start:stop], mask)
        target.write(start, hidden)
    target.flush()
    work.journal.record(EMBED, [])


def _block(
    work: Work,
    batches: Batches,
    spec: BlockSpec,
    source: HiddenStates,
    target: HiddenStates | None,
) -> None:
    """Observe, quantize and write one block; leave its outputs in `target`; record it."""
    module = batches.skeleton.load_block(work.weights, spec.index)
    planned = work.planned(spec.index)
    copy_tensors(work, [name for name in block_tensors(spec) if name not in planned])
    modules = by_what_they_read(work, batches, module, spec, list(planned.values()), source)
    layers = {
        layer.name: layer for layer in _solve_block(work, batches, module, spec, modules, source)
    }
    if target is not None:
        _run_on(batches, module, spec, source, target)
    finish_unit(
        work,
        f"block {spec.index}",
        block_tensors(spec),
        [layers[m.linear.name] for m in planned.values()],
    )


def _solve_block(
    work: Work,
    batches: Batches,
    module: nn.Module,
    spec: BlockSpec,
    modules: list[ModulePlan],
    source: HiddenStates,
) -> Iterator[Layer]:
    """Observe and solve round by round. New weights take their place in the block after the last
    round, or after each one where a stage is sequential."""
    waiting: list[tuple[ModulePlan, QuantizedTensor]] = []
    rounds = observation_rounds(work, modules)
    for members in rounds:
        stats = observe(work, batches, module, spec, members, source)
        observed = members is rounds[-1] or is_sequential(work, modules)
        for key, same_input in by_input(members):
            for m, quantized, layer in _solve(work, same_input, stats.pop(key)):
                waiting.append((m, quantized))
                while observed and waiting:
                    _put_in_place(work, module, *waiting.pop())
                yield layer


def _put_in_place(work: Work, module: nn.Module, m: ModulePlan, quantized: QuantizedTensor) -> None:
    """From here on the block computes with what the result will hold."""
    set_linear_weight(module, m.linear, quantized.dequantize(work.dtype))
    inputs = quantized.inputs()
    if inputs is not None and work.plan.format != dense.NAME:
        quantize_inputs(module.get_submodule(m.linear.module), inputs)


def _run_on(
    batches: Batches, module: nn.Module, spec: BlockSpec, source: HiddenStates, target: HiddenStates
) -> None:
    def write(hidden: Tensor, mask: Tensor | None, context: BlockContext, start: int) -> None:
        target.write(start, batches.skeleton.run_block(module, spec.index, hidden, context))

    batches.forward(source, write)
    target.flush()


def _solve(work: Work, members: list[ModulePlan], stats: Stats) -> Iterator[Solved]:
    """Quantize the layers of one shared input and write them: together are those of one stage
    and scheme whose weights are stored in one dtype, which is that of their scales."""

    def alike(m: ModulePlan) -> tuple[int, str, str]:
        return m.stage, m.scheme.describe(), work.checkpoint.tensors[m.linear.tensor].dtype

    for (stage_index, _, _), same in groupby(sorted(members, key=alike), key=alike):
        stage = work.plan.recipe.stages[stage_index]
        group = list(same)
        weights = [read_weight(work, m) for m in group]
        is_expert = group[0].linear.expert is not None
        outcomes = METHODS[stage.method].quantize(
            [w.to(work.device) for w in weights],
            group[0].scheme,
            stage.config,
            scale_dtype=weights[0].dtype,
            hessian=stats.hessian,
            expert_tokens=stats.tokens if is_expert else None,
        )
        for m, outcome in zip(group, outcomes, strict=True):
            store(work, m, outcome.quantized)
            layer = layer_record(
                m,
                error=outcome.error,
                method=outcome.method,
                tokens=stats.tokens,
                damping=outcome.damping,
                kept=outcome.kept,
                dead=outcome.dead,
            )
            yield m, outcome.quantized, layer
