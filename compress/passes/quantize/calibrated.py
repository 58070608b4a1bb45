"""The calibrated pass: block by block, load, observe, solve, write, run on, free.

A block is observed unquantized, on the inputs that the quantized blocks before it produce, so that
each layer also makes up for what its predecessors lost. Its outputs with the new weights become the
next block's inputs. Only one block, its Hessians and a batch of hidden states are in memory.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from compress.arch.spec import BlockSpec
from compress.blocks.skeleton import BlockContext, Skeleton
from compress.events import Event
from compress.passes import calibration_tokens
from compress.passes.context import PassContext, block_tensors, finish_unit, outside_tensors
from compress.passes.hidden_states import HiddenStates
from compress.passes.journal import CALIBRATION
from compress.passes.quantize.cache_peaks import Peaks
from compress.passes.quantize.head import quantize_head, round_rows
from compress.passes.quantize.observe import Batches, BlockPass, by_what_they_read
from compress.passes.quantize.scale import scale_channels, write_others
from compress.passes.quantize.solve import solve_block
from compress.passes.quantize.stream import stream_unit, units
from compress.passes.units import EMBED, HEAD, OUTSIDE, shown
from compress.plan.row_counts import rows_at_once


def calibrate(work: PassContext, folder: Path) -> None:
    """Quantize all blocks in order; units that the journal has are skipped."""
    config = work.plan.recipe.calibration
    assert config is not None, "the recipe parser asks for calibration where a stage needs it"
    spec = work.plan.spec
    if {unit for unit, _, _ in units(work.plan)} <= work.journal.units.keys():
        return
    skeleton = Skeleton(work.checkpoint.config, spec, dtype=work.dtype, device=work.device)
    if CALIBRATION not in work.journal.units:
        began = time.perf_counter()
        summary = calibration_tokens.prepare(config, work.weights, skeleton, folder, work.progress)
        work.journal.record(CALIBRATION, summary)
        work.progress(Event("calibrate", "all tokens drawn", 1, 1, time.perf_counter() - began))
    ids, mask = calibration_tokens.reload(folder, work.journal.units[CALIBRATION]["sha256"])
    shape = (ids.shape[0], ids.shape[1], spec.hidden)
    spills = [HiddenStates(folder / f"hidden.{i}", shape, work.dtype) for i in (0, 1)]
    rows = rows_at_once(shape, work.dtype, config.spill_bytes)
    _all_units(work, Batches(ids, mask, skeleton, rows), spills)


def _all_units(work: PassContext, batches: Batches, spills: list[HiddenStates]) -> None:
    """Everything outside the blocks, the embedded tokens, then block after block, and the head
    where it is calibrated."""
    blocks, head = work.plan.spec.blocks, work.head
    steps: list[tuple[str, Callable[[], None]]] = [
        (OUTSIDE, partial(stream_unit, work, OUTSIDE, None, outside_tensors(work.plan))),
        (EMBED, partial(_embed, work, batches, spills[0])),
    ]
    for block in blocks:
        source, target = spills[block.index % 2], spills[(block.index + 1) % 2]
        onward = None if block is blocks[-1] and head is None else target
        steps.append(
            (f"block {block.index}", partial(_block, work, batches, block, source, onward))
        )
    if head is not None:
        last = spills[len(blocks) % 2]
        steps.append((HEAD, partial(quantize_head, work, batches, head, last)))
    for position, (unit, step) in enumerate(steps):
        if unit in work.journal.units:
            continue
        began = time.perf_counter()
        step()
        spent = time.perf_counter() - began
        work.progress(Event("quantize", shown(unit), position + 1, len(steps), spent))


def _embed(work: PassContext, batches: Batches, target: HiddenStates) -> None:
    embedding = work.planned(None).get(work.plan.spec.embedding)
    change = (lambda rows: rows) if embedding is None else partial(round_rows, work, embedding)
    for start, stop in batches:
        mask = None if batches.mask is None else batches.mask[start:stop]
        hidden = batches.skeleton.embed(work.weights, batches.ids[start:stop], mask, change)
        target.write(start, hidden)
    target.flush()
    work.journal.record(EMBED, [])


def _block(
    work: PassContext,
    batches: Batches,
    spec: BlockSpec,
    source: HiddenStates,
    target: HiddenStates | None,
) -> None:
    """Observe, quantize and write one block; leave its outputs in `target`; record it."""
    module = batches.skeleton.load_block(work.weights, spec.index)
    planned = work.planned(spec.index)
    modules = by_what_they_read(work, batches, module, spec, list(planned.values()), source)
    block = BlockPass(work, batches, module, spec, source)
    scaled = scale_channels(block, modules)
    write_others(block, scaled.folds)
    layers = {layer.name: layer for layer in solve_block(block, modules, scaled)}
    peaks = None if work.plan.kv_cache is None else Peaks()
    if target is not None or peaks is not None:
        _run_on(block, target, peaks)
    if peaks is not None:
        peaks.write(work, spec)
    finish_unit(
        work,
        f"block {spec.index}",
        block_tensors(spec),
        [replace(layers[m.linear.name], passes=len(block.passes)) for m in planned.values()],
    )


def _run_on(block: BlockPass, target: HiddenStates | None, peaks: Peaks | None) -> None:
    """The quantized block over the calibration set: its outputs into `target`, where another block
    reads them, and its keys and values into `peaks`."""
    skeleton, index = block.batches.skeleton, block.spec.index

    def write(hidden: Tensor, mask: Tensor | None, context: BlockContext, start: int) -> None:
        cache = None if peaks is None else peaks.cache(mask)
        out = skeleton.run_block(block.module, index, hidden, context, cache)
        if target is not None:
            target.write(start, out)

    block.forward("run on", write)
    if target is not None:
        target.flush()
