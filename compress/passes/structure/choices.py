"""What open edits are measured by, and what that settles.

An open edit is one of which the recipe says how much goes, and data says what. It is measured
before its pass on the model that the pass reads, on the calibration rows that are held out of every
fit; by `loss` the models are compared with the one that the run was given.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, run_through
from compress.edits.counts import counted_of
from compress.edits.prune_depth import PruneDepthConfig
from compress.edits.select.depth import REMOVALS
from compress.evaluation.chains import divergences
from compress.events import Event
from compress.formats import Weights
from compress.passes.context import record_unit
from compress.passes.journal import CHOSEN
from compress.passes.ranks import decided
from compress.passes.structure.chains import held_batches
from compress.passes.structure.files import make_working
from compress.passes.structure.search import search_sizes, with_found
from compress.passes.structure.split import choose_latents, with_latents
from compress.passes.structure.tokens import Looking, skeleton_of, tokens_of
from compress.plan.search.trials import STORE
from compress.recipe.placing import placed
from compress.recipe.schema import EditStage

KEEP = "keep"  # key of the record: indices of the blocks that stay


def choose(look: Looking, stage: EditStage, source: Weights, folder: Path) -> None:
    """Measure what an open edit has to know of the model, and record it. folder: OUT.partial."""
    began = time.perf_counter()
    with placed(look.plan.recipe, stage.label):
        chosen = decided(look.ranks, partial(CHOICES[stage.method], look, stage, source, folder))
    record_unit(look, CHOSEN, chosen)
    spent = time.perf_counter() - began
    look.progress(Event(stage.method, "what goes is chosen", 1, 1, spent))


def settled(stage: EditStage, record: Mapping[str, Any]) -> EditStage:
    """The stage with what was measured in place of what was open."""
    return replace(stage, config=SETTLED[stage.method](stage.config, record))


def _blocks(look: Looking, stage: EditStage, source: Weights, folder: Path) -> dict[str, Any]:
    """Blocks that stay, ascending."""
    config, count = stage.config, len(look.weights.spec.blocks)
    assert isinstance(config, PruneDepthConfig), "another edit is open"
    assert config.layers is not None, "nothing is open"
    gone = count - counted_of("layers", config.layers, count)
    if not gone:
        return {KEEP: list(range(count))}
    ids, mask = tokens_of(look, source, folder)
    batches = held_batches(ids, mask, look.weights.spec.hidden)
    working = make_working(folder)

    def store(name: str, weights: Weights) -> HiddenStates:
        shapes = [(*batch.ids.shape, weights.spec.hidden) for batch in batches]
        return HiddenStates(working / name, shapes, look.dtype, budget=STORE)

    with store("chosen.source", source) as given, store("chosen.model", look.weights) as own:
        teacher = Chain(skeleton_of(look, source), source, batches, (given,))
        if config.by == "loss":
            run_through(teacher)
        chain = Chain(skeleton_of(look, look.weights), look.weights, batches, (own,))
        order = REMOVALS[config.by](
            chain,
            gone,
            lambda name: store(f"chosen.{name}", look.weights),
            partial(divergences, teacher),
        )
    return {KEEP: [index for index in range(count) if index not in order], "order": list(order)}


def _kept(config: PruneDepthConfig, record: Mapping[str, Any]) -> PruneDepthConfig:
    return replace(config, layers=None, keep=tuple(record[KEEP]))


CHOICES: Mapping[str, Callable[[Looking, EditStage, Weights, Path], dict[str, Any]]] = (
    MappingProxyType({"prune_depth": _blocks, "prune": search_sizes, "mla": choose_latents})
)
SETTLED: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = MappingProxyType(
    {"prune_depth": _kept, "prune": with_found, "mla": with_latents}
)
