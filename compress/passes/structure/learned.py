"""The pass of an edit that looks at data: block by block, with the source's chain beside it.

At a block the edit changes one site after another; each is put in place before the next is looked
at. The block is then written, and run as it was written, so what the next one reads is what it will
read in the result. Memory holds a block of each chain, and the moments of a site.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from torch import Tensor

from compress.arch.resize.cut import Kept, cut_name
from compress.events import Event
from compress.passes.context import block_tensors, record_unit
from compress.passes.copying import copy
from compress.passes.ranks import decided
from compress.passes.structure.chains import Chains, embed, open_chains
from compress.passes.structure.change import LearnedPass, record_written
from compress.passes.structure.files import (
    GRADIENTS,
    learned_units,
    make_working,
    remove_files,
    remove_states,
)
from compress.passes.structure.gradients import FILE, find_changes, read_changes
from compress.passes.structure.identity import check_identity
from compress.passes.structure.narrow import narrowing_units
from compress.passes.structure.rebuild import rebuilt
from compress.passes.structure.streams import outside_factors
from compress.passes.structure.tokens import tokens_of
from compress.passes.units import EMBED, IDENTITY, OUTSIDE, block_unit, shown
from compress.recipe.placing import placed

DIFFERENCE = "difference"  # key of the record of the identity


def apply_learned(each: LearnedPass) -> None:
    """Carry out every unit that the journal does not have as finished."""
    work, stage = each.work, each.planned.stage
    assert stage is not None, "the pass is no edit"
    with placed(work.plan.recipe, stage.label):
        tokens = tokens_of(work, each.source, each.folder)
        folder = make_working(each.folder)
        if GRADIENTS in learned_units(each.planned):
            if GRADIENTS not in work.journal.units:
                record_unit(work, GRADIENTS, decided(work.ranks, partial(_gradients, each, tokens)))
            sha256 = work.journal.units[GRADIENTS]["sha256"]
            each = replace(each, changes=read_changes(folder, sha256))
        if IDENTITY not in work.journal.units:
            record_unit(work, IDENTITY, {DIFFERENCE: check_identity(each, tokens[0])})
        chains = open_chains(work, each.planned, each.source, tokens, folder)
        carry = narrowing_units if each.planned.narrows else _all_units
        names, began = learned_units(each.planned), time.perf_counter()
        for unit in carry(each, chains):
            now = time.perf_counter()
            position = names.index(unit) + 1
            work.progress(Event(stage.method, shown(unit), position, len(names), now - began))
            began = now
    remove_states(folder)
    remove_files(folder, [FILE])


def _gradients(each: LearnedPass, tokens: tuple[Tensor, Tensor | None]) -> dict[str, Any]:
    return {"sha256": find_changes(each.work, tokens, make_working(each.folder))}


def _all_units(each: LearnedPass, chains: Chains) -> Iterator[str]:
    """What lies outside the blocks, the embedded tokens, then block after block."""
    work, done = each.work, each.work.journal.units
    if OUTSIDE not in done:
        inside = {name for block in work.weights.spec.blocks for name in block_tensors(block)}
        outside = [name for name in each.planned.source.tensors if name not in inside]
        spec, layers = work.weights.spec, each.planned.kept
        called = {name: cut_name(spec, name, Kept(), layers) for name in outside}
        names = {name: to for name, to in called.items() if to is not None}
        factors = outside_factors(spec, each.planned.stream)
        copy(work.checkpoint, work.writer, names, names, factors)
        record_written(each, OUTSIDE, list(names.values()))
        yield OUTSIDE
    if EMBED not in done:
        embed(chains)
        record_unit(work, EMBED, {})
        yield EMBED
    for block in each.planned.result.spec.blocks:
        if block_unit(block.index) not in done:
            _block(each, chains, block.index)
            yield block_unit(block.index)


def _block(each: LearnedPass, chains: Chains, turn: int) -> None:
    """Change, write and record block `turn` of the result; leave the states behind it."""
    work, made = each.work, rebuilt(each, chains, turn)
    made.block.run_on()
    chains.flush(turn + 1)
    for name, value in made.tensors.items():
        if work.ranks.rank == 0:
            work.writer.write(name, value)
    facts = [asdict(x.fact) for x in made.changes if x.fact is not None]
    record_written(each, block_unit(turn), list(made.tensors), facts)
