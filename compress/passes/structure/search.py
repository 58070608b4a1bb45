"""The search of an open `prune`: which sizes, of those that meet its budget, lose the least.

What every axis loses by itself is measured on a grid, each after repair. The losses are added up
for every combination that meets the budget; those that promise the least are measured together, as
losses do not add up in depth. Of the least of these other blocks are tried in place of the last one
that went, as the order in which blocks go is that without repair; and the least of all is taken.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from compress.arch.resize.shape import sizes_after
from compress.artifacts.recipe_exports import check_artifact
from compress.blocks.walk import Chain
from compress.edits.prune import PruneConfig, PrunedSizes, with_sizes
from compress.edits.select.depth import REMOVALS
from compress.errors import CheckpointError, CompressError, DataError, RecipeError
from compress.evaluation.chains import divergences
from compress.events import Event
from compress.formats import Weights
from compress.passes.structure.files import make_working
from compress.passes.structure.tokens import Looking, skeleton_of
from compress.passes.structure.trial import (
    Bench,
    loss_of,
    open_bench,
    planned_with,
    recipe_with,
)
from compress.plan.passes import PassPlan, plan_edits
from compress.plan.search.costs import SizeCosts, known_costs, label_of
from compress.plan.search.predicted import points_alone, predicted_loss
from compress.plan.search.sizes import Counts, SizeSpace
from compress.plan.search.space import measured
from compress.plan.search.trials import SWAPS, TOGETHER
from compress.recipe.schema import EditStage
from compress.report.records.sizes import SizeCandidate

LOST = 1e9  # what stands for a loss that is not a number: JSON has no infinity
SIZES, CANDIDATES = "sizes", "candidates"  # keys of the record


@dataclass(frozen=True, slots=True)
class Tried:
    """A point that was measured. predicted: the sum of what its axes lose alone; None for one of
    these."""

    point: Counts
    sizes: PrunedSizes
    loss: float
    predicted: float | None = None


@dataclass(slots=True, eq=False)
class Search:
    """A search in progress. order: blocks in the order in which they go. done: trials so far."""

    bench: Bench
    stage: EditStage
    space: SizeSpace
    costs: SizeCosts
    order: Sequence[int] = ()
    done: int = 0

    def sizes(self, point: Counts) -> PrunedSizes:
        """The options that say a point."""
        first = self.space.first_blocks(point)
        if first is None:
            return self.space.sizes(point, None)
        count = len(self.space.source.spec.blocks)
        gone = set(self.order[: count - len(first)])
        return self.space.sizes(point, tuple(i for i in range(count) if i not in gone))


def search_sizes(look: Looking, stage: EditStage, source: Weights, folder: Path) -> dict[str, Any]:
    """The record of a search: the sizes, and what was measured. folder: OUT.partial.

    RecipeError where no combination is taken by what comes behind.
    """
    planned = next(x for x in look.plan.edits if x.stage is not None and x.stage == stage)
    assert planned.space is not None, "an open stage is planned with its space"
    space, arithmetic = planned.space, (look.device.partition(":")[0], str(look.dtype))
    costs = known_costs(look.plan.recipe, stage, source.checkpoint, arithmetic)
    with open_bench(look, source, folder, make_working(folder)) as bench:
        search = Search(bench, stage, space, costs)
        search.order = _order(search)
        alone = [_tried(search, point) for point in points_alone(space)]
        losses = {x.point: x.loss for x in alone}
        predicted = {x: predicted_loss(space, x, losses) for x in space.points}
        together = _together(search, _with_bits(search, predicted))
        best = min(together, key=_rank)
        together += _swapped(search, best)
    best = min(together, key=_rank)
    if best.loss == LOST:
        raise DataError("no sizes that meet the budget leave numbers that are finite; raise it")
    known = {x.sizes for x in together}
    # Beside losses that have those of schemes in them, the losses of sizes alone say nothing.
    rest = () if space.shared else (x for x in alone if x.sizes not in known)
    found = [*together, *rest]
    listed = [_candidate(search, x, "chosen" if x is best else "") for x in found]
    return {SIZES: asdict(best.sizes), CANDIDATES: [asdict(x) for x in listed]}


def _rank(tried: Tried) -> tuple[float, float]:
    """The least loss first; of equals that which promised less, which is also the first tried."""
    return tried.loss, tried.predicted or 0.0


def with_found(config: PruneConfig, record: Mapping[str, Any]) -> PruneConfig:
    """The options with what a search recorded."""
    held, layers = record[SIZES], record[SIZES]["layers"]
    sizes = PrunedSizes(**{**held, "layers": None if layers is None else tuple(layers)})
    return with_sizes(config, sizes)


def _with_bits(search: Search, predicted: Mapping[Counts, float]) -> dict[Counts, float]:
    """The predictions, where schemes share the bytes with what the best of these lose added; sizes
    that leave too little for the smallest are none."""
    if search.bench.work.shared is None:
        return dict(predicted)
    found = {}
    for point, loss in predicted.items():
        with suppress(RecipeError):
            found[point] = loss + _bits(search, search.sizes(point))[0]
    return found


def _bits(search: Search, sizes: PrunedSizes) -> tuple[float, int]:
    """What the best schemes lose beside these sizes, and the bytes of the result."""
    shared, count = search.bench.work.shared, len(search.space.source.spec.blocks)
    assert shared is not None, "no stage behind shares the bytes"
    kept = range(count) if sizes.layers is None else sizes.layers
    return shared.best(_planned(search, sizes).result, tuple(kept))


def _order(search: Search) -> Sequence[int]:
    """Blocks in the order in which they go: as many as any point is without, and those to swap."""
    bench, costs, count = search.bench, search.costs, len(search.space.source.spec.blocks)
    kept = [search.space.first_blocks(x) for x in search.space.points]
    gone = max((count - len(x) for x in kept if x is not None), default=0)
    gone = min(gone + SWAPS, count - 1) if gone else 0
    if len(costs.order) < gone:
        work = bench.work
        with bench.store("trial.whole") as own:
            skeleton = skeleton_of(work, work.weights)
            chain = Chain(skeleton, work.weights, bench.teacher.batches, (own,))
            losses = partial(divergences, bench.teacher)
            costs.order = list(REMOVALS["loss"](chain, gone, bench.store, losses))
        costs.keep()
    return costs.order


def _together(search: Search, predicted: Mapping[Counts, float]) -> list[Tried]:
    """The combinations that promise the least, of those that all that follows takes."""
    found: list[Tried] = []
    refused = ""
    for point in sorted(predicted, key=lambda x: (predicted[x], x)):
        if len(found) == TOGETHER:
            break
        try:
            _check(search, point)
        except CompressError as error:
            refused = str(error)
        else:
            sizes = search.sizes(point)
            found.append(Tried(point, sizes, _loss_together(search, sizes), predicted[point]))
    if not found:
        raise RecipeError(
            f"no sizes that meet the budget are taken by what comes behind: {refused}"
        )
    return found


def _swapped(search: Search, best: Tried) -> Iterator[Tried]:
    """The best combination with other blocks in place of the last one that goes."""
    layers, count = best.sizes.layers, len(search.space.source.spec.blocks)
    if layers is None:
        return
    gone = count - len(layers)
    for other in search.order[gone : gone + SWAPS]:
        without = {*search.order[: gone - 1], other}
        kept = tuple(i for i in range(count) if i not in without)
        sizes = replace(best.sizes, layers=kept)
        try:
            loss = _loss_together(search, sizes)
        except CheckpointError:  # config.json cannot say what these blocks leave
            continue
        yield replace(best, sizes=sizes, loss=loss)


def _check(search: Search, point: Counts) -> None:
    """CompressError for sizes that an edit behind or an export does not take, or that are beyond
    the budget by their headers."""
    work, space = search.bench.work, search.space
    stage = search.stage
    recipe = recipe_with(work, stage, with_sizes(stage.config, search.sizes(point)))
    passes = list(plan_edits(recipe, work.plan.source))
    mine = next(x for x in passes if x.stage is not None and x.stage.index == stage.index)
    takes = measured(mine.result)[space.counter.measure]
    if takes > space.limit and not space.shared:
        raise RecipeError(f"{takes} are more than {space.limit}")
    last = passes[-1].result
    checkpoint = replace(
        search.bench.source.checkpoint, config=dict(last.config), tensors=last.tensors
    )
    for config in work.plan.recipe.export:
        check_artifact(config, checkpoint, last.spec, calibrated=True)


def _tried(search: Search, point: Counts) -> Tried:
    sizes = search.sizes(point)
    return Tried(point, sizes, _loss(search, sizes))


def _loss(search: Search, sizes: PrunedSizes) -> float:
    """What sizes lose; measured where it is not known, and kept then."""
    began, label = time.perf_counter(), label_of(sizes)
    known = search.costs.losses
    if label not in known:
        found = loss_of(search.bench, _planned(search, sizes))
        known[label] = found if math.isfinite(found) else LOST
        search.costs.keep()
    search.done += 1
    spent = time.perf_counter() - began
    say = search.bench.work.progress
    say(Event(search.stage.method, f"tried {label}", search.done, _trials(search), spent))
    return known[label]


def _loss_together(search: Search, sizes: PrunedSizes) -> float:
    """What sizes lose, with the best schemes where these share the bytes."""
    shared = search.bench.work.shared is not None
    return _loss(search, sizes) + (_bits(search, sizes)[0] if shared else 0.0)


def _trials(search: Search) -> int:
    """How many there are in all, at most."""
    space = search.space
    swaps = SWAPS if search.order else 0
    return len(list(points_alone(space))) + min(TOGETHER, len(space.points)) + swaps


def _planned(search: Search, sizes: PrunedSizes) -> PassPlan:
    """The pass of the stage with these sizes."""
    stage = search.stage
    return planned_with(search.bench.work, stage, with_sizes(stage.config, sizes))


def _candidate(search: Search, tried: Tried, place: str) -> SizeCandidate:
    """The report's line; where schemes share the bytes, with the bytes of both."""
    space, shared = search.space, search.bench.work.shared
    shape, sizes = space.shape(tried.point), space.source.spec.blocks[0].sizes
    layers, whole = tried.sizes.layers, len(space.source.spec.blocks)
    after = sizes_after(space.source.spec, shape).blocks[0]
    counts = {
        "ffn": after.intermediate if sizes.dense else after.expert,
        "heads": after.heads,
        "kv_heads": after.kv_heads,
        "layers": whole if layers is None else len(layers),
    }
    if after.experts:
        counts["experts"] = after.experts
    takes = space.takes(tried.point) if shared is None else _bits(search, tried.sizes)[1]
    return SizeCandidate(counts, space.counter.measure, takes, tried.loss, tried.predicted, place)
