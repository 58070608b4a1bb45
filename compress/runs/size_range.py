"""Between how many bytes the result lies, while its sizes wait for a measurement."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from compress.errors import CompressError
from compress.plan.budget import budget_units, with_choice
from compress.plan.passes import EditedModel, PassPlan, edited
from compress.plan.plan import build_plan
from compress.plan.search.sizes import Counts, SizeSpace
from compress.plan.search.space import with_point
from compress.recipe import EditStage, Recipe


def result_range(recipe: Recipe, model: EditedModel, dtype: torch.dtype) -> tuple[int, int] | None:
    """Least and most bytes of the files of the result; None where all sizes are known.

    model: that of the recipe. dtype: of calibrated passes.
    """
    if not any(map(_has_open_sizes, model.edits)):
        return None
    found = list(_all_bytes(recipe, model, dtype))
    lows, highs = zip(*found, strict=True)
    return min(lows), max(highs)


def _all_bytes(recipe: Recipe, model: EditedModel, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Of every model that there may be, the least and most that its schemes take."""
    planned = next(filter(_has_open_sizes, model.edits), None)
    if planned is None:
        yield _bytes(recipe, model, dtype)
        return
    most = planned.space.limit if planned.space is not None and planned.space.shared else None
    for known in _settled(planned):
        edits = tuple(known if x.index == known.index else x for x in recipe.edits)
        settled = replace(recipe, edits=edits)
        with suppress(CompressError):  # what a later stage refuses is not chosen either
            now = edited(settled, model.source, model.teachers)
            for low, high in _all_bytes(settled, now, dtype):
                yield low, high if most is None else min(high, most)


def _has_open_sizes(planned: PassPlan) -> bool:
    return planned.space is not None or bool(planned.splits)


def _settled(planned: PassPlan) -> Sequence[EditStage]:
    """The stage of a pass with each of the sizes that wait for a measurement."""
    stage, space = planned.stage, planned.space
    assert stage is not None, "an open pass is one of an edit"
    if space is not None:
        return [with_point(stage, space, point) for point in _told(space)]
    return [replace(stage, config=each) for each in planned.splits]


def _told(space: SizeSpace) -> Sequence[Counts]:
    """Points whose results have all others between them: where schemes share the bytes, which all
    sizes use up, the least and the largest of some hundreds."""
    if not space.shared:
        return space.points
    return tuple({pick(space.points, key=space.takes): None for pick in (min, max)})


def _bytes(recipe: Recipe, model: EditedModel, dtype: torch.dtype) -> tuple[int, int]:
    if not recipe.stages:
        return model.rounded.file_bytes, model.rounded.file_bytes
    units = budget_units(recipe, model.rounded, model.source)
    if not units:
        size = build_plan(recipe, model, dtype=dtype).shards.total_bytes
        return size, size
    settled, budget = with_choice(recipe, units, None)
    size = build_plan(settled, model, dtype=dtype).shards.total_bytes
    return size, size + budget.high - budget.low
