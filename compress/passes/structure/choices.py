"""What open edits are measured by, and what that settles.

An open edit is one of which the recipe says how much goes, and data says what. It is measured
before its pass on the model that the pass reads, on the calibration rows that are held out of every
fit; by `loss` the models are compared with the one that the run was given.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from compress.arch.describe import describe
from compress.blocks.skeleton import Skeleton
from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, run_through
from compress.edits.counts import counted_of
from compress.edits.hybrid import HybridConfig, able_layers, count_of, width_of, with_windows
from compress.edits.prune_depth import PruneDepthConfig
from compress.edits.select.depth import REMOVALS, Scratch
from compress.edits.select.windows import WINDOWS_BY, Versions
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

KEEP = "keep"  # key of the record: indices of the blocks that stay, or stay as they are


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
    with _measuring(look, source, folder) as (teacher, chain, scratch):
        if config.by == "loss":
            run_through(teacher)
        order = REMOVALS[config.by](chain, gone, scratch, partial(divergences, teacher))
    return {KEEP: [index for index in range(count) if index not in order], "order": list(order)}


def _windows(look: Looking, stage: EditStage, source: Weights, folder: Path) -> dict[str, Any]:
    """Layers that stay without a window, ascending."""
    config, planned = stage.config, next(x for x in look.plan.edits if x.stage == stage)
    assert isinstance(config, HybridConfig), "another edit is open"
    model, able = planned.source, able_layers(planned.source)
    steps = len(able) - count_of(model, config)
    everywhere = with_windows(model, width_of(model, config), able).config
    spec = describe(everywhere, model.shapes)
    order: list[int] = []
    with _measuring(look, source, folder) as (teacher, chain, scratch):
        run_through(teacher)
        skeleton = Skeleton(everywhere, spec, dtype=look.dtype, device=look.device)
        versions = Versions(chain, replace(chain, skeleton=skeleton))
        losses, began = partial(divergences, teacher), time.perf_counter()
        for gain in WINDOWS_BY[config.by](versions, able, steps, scratch, losses):
            order.append(gain.layer)
            spent = time.perf_counter() - began
            said = f"window in layer {gain.layer}, KL {gain.losses[gain.layer]:.4g}"
            look.progress(Event(stage.method, said, len(order), steps, spent))
            began = time.perf_counter()
    return {KEEP: [index for index in able if index not in order], "order": order}


@contextmanager
def _measuring(
    look: Looking, source: Weights, folder: Path
) -> Iterator[tuple[Chain, Chain, Scratch]]:
    """Chains of the source and of the model over the rows that are held out, neither run yet, and
    what makes stores like the model's."""
    ids, mask = tokens_of(look, source, folder)
    batches = held_batches(ids, mask, look.weights.spec.hidden)
    working = make_working(folder)

    def store(name: str, weights: Weights) -> HiddenStates:
        shapes = [(*batch.ids.shape, weights.spec.hidden) for batch in batches]
        return HiddenStates(working / name, shapes, look.dtype, budget=STORE)

    with store("chosen.source", source) as given, store("chosen.model", look.weights) as own:
        teacher = Chain(skeleton_of(look, source), source, batches, (given,))
        chain = Chain(skeleton_of(look, look.weights), look.weights, batches, (own,))
        yield teacher, chain, lambda name: store(f"chosen.{name}", look.weights)


def _kept(config: PruneDepthConfig, record: Mapping[str, Any]) -> PruneDepthConfig:
    return replace(config, layers=None, keep=tuple(record[KEEP]))


def _global(config: HybridConfig, record: Mapping[str, Any]) -> HybridConfig:
    return replace(config, global_=None, keep=tuple(record[KEEP]))


CHOICES: Mapping[str, Callable[[Looking, EditStage, Weights, Path], dict[str, Any]]] = (
    MappingProxyType(
        {
            "prune_depth": _blocks,
            "prune": search_sizes,
            "hybrid": _windows,
            "mla": choose_latents,
        }
    )
)
SETTLED: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = MappingProxyType(
    {"prune_depth": _kept, "prune": with_found, "hybrid": _global, "mla": with_latents}
)
