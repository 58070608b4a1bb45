"""The pass that trains each block alone, on what enters it in the edited model: scope "block".

In memory are one block of each chain and the optimizer of one.
"""

import time
from dataclasses import replace
from functools import partial

import torch

from compress.arch.spec import BlockSpec
from compress.blocks.landed import land, unland
from compress.blocks.walk import LoadedBlock
from compress.distill.block import block_scope
from compress.distill.coded import Moving
from compress.distill.loop import Learned, train
from compress.distill.student import linears_of
from compress.distill.trained import Trained, tuned
from compress.events import Event
from compress.passes.context import record_unit
from compress.passes.copying import copy
from compress.passes.edit import WRITTEN
from compress.passes.ranks import decided
from compress.passes.structure.chains import (
    Chains,
    advance_source,
    embed,
    load,
    open_chains,
    wanted,
)
from compress.passes.structure.files import remove_states
from compress.passes.training.codes import (
    codes_of,
    moving_of,
    stored_dtype,
    stored_parts,
    stored_tensors,
)
from compress.passes.training.rows import rows_of
from compress.passes.training.setting import TrainingPass, training_of
from compress.passes.training.units import LEARNED, told
from compress.passes.training.whole import joined
from compress.passes.units import EMBED, OUTSIDE, block_unit, shown
from compress.quant.tensor import QuantizedTensor


def train_blocks(each: TrainingPass) -> None:
    """Carry out what the journal does not have as finished."""
    work, done = each.work, each.work.journal.units
    learn, held = rows_of(each)
    rows = joined(learn, held)
    chains = open_chains(work, each.planned, each.teacher, (rows.ids, rows.mask), each.working)
    blocks = each.planned.result.spec.blocks
    if OUTSIDE not in done:
        inside = {name for block in blocks for name in stored_tensors(work.weights, block)}
        outside = [name for name in work.checkpoint.tensors if name not in inside]
        copy(work.checkpoint, work.writer, outside)
        _record(each, OUTSIDE, outside)
    if EMBED not in done:
        embed(chains)
        record_unit(work, EMBED, {})
    for block in blocks:
        began = time.perf_counter()
        if block_unit(block.index) not in done:
            _block(each, chains, block, len(held.ids))
            spent = time.perf_counter() - began
            unit = shown(block_unit(block.index))
            work.progress(Event("distill", unit, block.index + 1, len(blocks), spent))
    remove_states(each.working)


def _block(each: TrainingPass, chains: Chains, spec: BlockSpec, held: int) -> None:
    """Train, write and record one block; leave the states behind it."""
    work, turn = each.work, spec.index
    advance_source(chains, turn).free()
    edited = load(chains.edited, turn, turn)
    family = work.weights.spec.family
    landed = {} if each.config.tunes else unland(edited.module, spec, family)
    learned = decided(work.ranks, partial(_trained, each, chains, edited, held))
    names = stored_tensors(work.weights, spec)
    parts = land(stored_parts(work.weights, learned.weights), landed)
    rest = [name for name in names if name not in parts]
    copy(work.checkpoint, work.writer, rest)
    for name, value in parts.items():
        work.writer.write(name, value)
    edited.run_on()
    chains.flush(turn + 1)
    _record(each, block_unit(turn), names, learned)


def _trained(each: TrainingPass, chains: Chains, edited: LoadedBlock, held: int) -> Learned:
    """What becomes of a block; its module computes with that from here on."""
    work, spec = each.work, edited.spec
    length, stored = edited.between.batches[0].ids.shape[1], stored_dtype(work)
    rows = sum(len(batch.ids) for batch in edited.between.batches) - held
    training = training_of(each.config, rows, length, each.seed)
    trained = _of_block(each, edited, moving_of(each, training))
    before = {name: value.detach().clone() for name, value in trained.results.items()}
    with wanted(chains, spec.index + 1, each.working) as targets:
        scope = block_scope(edited, trained, targets, held, each.seed)
        scope = replace(scope, micro=training.micro)
        learned = train(scope, training, stored, progress=work.progress)
    with torch.no_grad():
        for name, value in () if learned.weights else before.items():
            trained.results[name].copy_(value)
    for coded in () if learned.weights else trained.coded:
        coded.undo()
    edited.module.requires_grad_(False)
    return replace(learned, ended=learned.ended + _moved(trained, learned))


def _moved(trained: Trained, learned: Learned) -> str:
    """How many codes are others than before, for the report."""
    pairs = [(each.start, learned.weights.get(each.tensor)) for each in trained.coded]
    both = [(old, new) for old, new in pairs if isinstance(new, QuantizedTensor)]
    count = sum(old.codes.numel() for old, _ in both)
    if not count:
        return ""
    others = sum(int((old.codes != new.codes).sum()) for old, new in both)
    return f"; {others / count:.1%} of the codes moved"


def _of_block(each: TrainingPass, edited: LoadedBlock, moving: Moving | None) -> Trained:
    """All parameters of a block, or of a rounded one what the stage names. moving: how codes do."""
    spec, names = edited.spec, dict(edited.spec.modules)
    if each.config.tunes:
        linears = linears_of(spec)
        codes = codes_of(each.work.weights, linears)
        return tuned(edited.module, names, linears, codes, each.config.train, moving)
    edited.module.requires_grad_(True)
    parameters = dict(edited.module.named_parameters())
    named = {tensor: parameters[path] for tensor, path in names.items() if path in parameters}
    return Trained(named, named, matrices=frozenset(linears_of(spec)) & named.keys())


def _record(
    each: TrainingPass, unit: str, names: list[str], learned: Learned | None = None
) -> None:
    """Flush what a unit wrote, then record it."""
    work = each.work
    if work.ranks.rank == 0:
        work.writer.flush(names)
    work.writer.written |= set(names)
    what = {} if learned is None else {LEARNED: told(unit, learned)}
    record_unit(work, unit, {WRITTEN: names, **what})
