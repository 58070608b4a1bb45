"""The calibrated pass: block by block, load, observe, solve, write, run on, free.

A block is observed unquantized, on the inputs that the quantized blocks before it produce, so that
each layer also makes up for what its predecessors lost. Its outputs with the new weights become the
next block's inputs. Only one block, its Hessians and a batch of hidden states are in memory.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from compress.blocks.author import Author
from compress.blocks.skeleton import Skeleton
from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, LoadedBlock, no_cache, token_batches, walk
from compress.events import Event
from compress.passes import calibration_tokens
from compress.passes.context import (
    PassContext,
    block_tensors,
    finish_unit,
    outside_tensors,
    record_unit,
)
from compress.passes.journal import CALIBRATION
from compress.passes.quantize.cache_peaks import Peaks
from compress.passes.quantize.head import quantize_head, round_rows
from compress.passes.quantize.observe import BlockPass, by_what_they_read
from compress.passes.quantize.scale import scale_channels, write_others
from compress.passes.quantize.solve import solve_block
from compress.passes.quantize.stream import stream_unit, units
from compress.passes.ranks import decided
from compress.passes.units import EMBED, HEAD, OUTSIDE, block_unit, shown
from compress.plan.row_counts import rows_at_once


def calibrate(work: PassContext, folder: Path) -> None:
    """Quantize all blocks in order; units that the journal has are skipped."""
    config = work.plan.recipe.calibration
    assert config is not None, "the recipe parser asks for calibration where a stage needs it"
    spec = work.plan.spec
    names = [unit for unit, _, _ in units(work.plan)]
    if set(names) <= work.journal.units.keys():
        return
    skeleton = Skeleton(work.checkpoint.config, spec, dtype=work.dtype, device=work.device)
    if CALIBRATION not in work.journal.units:
        began = time.perf_counter()
        author = Author(work.weights, lambda: skeleton, work.kept)
        draw = partial(calibration_tokens.of_run, config, author, folder, work.journal.journal)
        record_unit(work, CALIBRATION, decided(work.ranks, partial(draw, work.progress)))
        work.progress(Event("calibrate", "all tokens drawn", 1, 1, time.perf_counter() - began))
    ids, mask = calibration_tokens.reload(folder, work.journal.units[CALIBRATION]["sha256"])
    rows = rows_at_once((*ids.shape, spec.hidden), work.dtype, config.spill_bytes)
    batches = token_batches(ids, mask, min(rows, max(1, len(ids) // work.ranks.size)))
    shapes = [(*batch.ids.shape, spec.hidden) for batch in batches]
    # Two that take turns: a run that dies inside a block finds what enters it as it was.
    spills = tuple(HiddenStates(folder / f"hidden.{i}", shapes, work.dtype) for i in (0, 1))
    names.insert(1, EMBED)
    began = time.perf_counter()
    share = batches[work.ranks.rank :: work.ranks.size]
    assert share, f"{len(ids)} rows are too few for {work.ranks.size} ranks"
    for unit in _all_units(work, Chain(skeleton, work.weights, share, spills)):
        now = time.perf_counter()
        position = names.index(unit) + 1
        work.progress(Event("quantize", shown(unit), position, len(names), now - began))
        began = now


def _all_units(work: PassContext, chain: Chain) -> Iterator[str]:
    """Everything outside the blocks, the embedded tokens, then block after block, and the head
    where it is calibrated; each unit's name as it is done."""
    done, head, blocks = work.journal.units, work.head, work.plan.spec.blocks
    if OUTSIDE not in done:
        stream_unit(work, OUTSIDE, None, outside_tensors(work.plan))
        yield OUTSIDE
    if EMBED not in done:
        _embed(work, chain)
        yield EMBED
    for block in walk(chain, [b for b in blocks if block_unit(b.index) not in done]):
        _block(work, block, onward=block.spec is not blocks[-1] or head is not None)
        yield block_unit(block.spec.index)
    if head is not None and HEAD not in done:
        quantize_head(work, chain, head)
        yield HEAD


def _embed(work: PassContext, chain: Chain) -> None:
    embedding = work.planned(None).get(work.plan.spec.embedding)
    if embedding is None:
        chain.embed()
    else:
        chain.embed(partial(round_rows, work, embedding))
    chain.entering(0).flush()
    record_unit(work, EMBED, [])


def _block(work: PassContext, loaded: LoadedBlock, *, onward: bool) -> None:
    """Observe, quantize and write one block; leave its outputs behind it; record it.

    onward: whether anything reads those.
    """
    spec = loaded.spec
    planned = work.planned(spec.index)
    modules = by_what_they_read(work, loaded, list(planned.values()))
    block = BlockPass(work, loaded)
    scaled = scale_channels(block, modules)
    write_others(block, scaled.folds)
    layers = {layer.name: layer for layer in solve_block(block, modules, scaled)}
    peaks = None if work.plan.kv_cache is None else Peaks()
    if onward or peaks is not None:
        block.passes.append("run on")
        loaded.run_on(no_cache if peaks is None else peaks.cache, store=onward)
    if onward:
        loaded.target.flush()
    if peaks is not None:
        peaks.write(work, spec)
    finish_unit(
        work,
        block_unit(spec.index),
        block_tensors(spec),
        [replace(layers[m.linear.name], passes=len(block.passes)) for m in planned.values()],
    )
