"""The space of sizes of an open `prune` stage, or why there is none."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from compress.arch.resize.config import resized
from compress.arch.resize.shape import Shape, sizes_after
from compress.checkpoint.outline import Outline
from compress.edits.prune import Axis, PruneConfig, with_sizes
from compress.edits.prune_depth import require_alike
from compress.edits.writers import check_roles
from compress.errors import CheckpointError, RecipeError
from compress.plan.search.bits import budget_of, stored_entries
from compress.plan.search.later import rounded_linears, why_not_rounded
from compress.plan.search.sizes import (
    Counter,
    Counts,
    SizeSpace,
    whole_of,
    widths_of,
    with_points,
)
from compress.recipe import EditStage, Recipe
from compress.report.units import counted, size

# Why a count on an axis cannot be; None where it can.
WhyNot = Callable[[Axis, int], str | None]


def space_of(recipe: Recipe, given: Outline, source: Outline, config: PruneConfig) -> SizeSpace:
    """The sizes that a budget leaves open, and those that later stages take.

    given: the recipe's source. source: the model before the stage. RecipeError for a budget that is
    out of reach, with the nearest; CheckpointError for an axis on which nothing can go.
    """
    assert config.budget is not None, "the sizes are known"
    check_roles(source.spec)
    _check_axes(source, config)
    why_not, measure = _why_not(recipe, source), config.budget.asked[0]
    axes = {axis: _values(source, axis, config, why_not) for axis in config.axes}
    counter, shared = Counter(source, measure), budget_of(recipe) == config
    if shared:
        stored = stored_entries(recipe, source.spec)
        header = stored.header_bytes(list(source.entries), recipe.output.shard_size)
        counter = Counter(source, measure, stored.nbytes, header)
    limit = limit_of(given, source, config)
    space = with_points(SizeSpace(source, axes, counter, limit, shared=shared))
    if not space.points:
        raise RecipeError(_out_of_reach(space, given))
    return space


def open_space(
    recipe: Recipe, given: Outline, source: Outline, stage: EditStage
) -> SizeSpace | None:
    """The sizes that a stage leaves open; None for most stages. Arguments as of `space_of`."""
    if not isinstance(stage.config, PruneConfig) or not stage.is_open:
        return None
    return space_of(recipe, given, source, stage.config)


def with_point(stage: EditStage, space: SizeSpace, point: Counts) -> EditStage:
    """The stage with the sizes of a point, and the first blocks where some go: all are alike."""
    return replace(
        stage, config=with_sizes(stage.config, space.sizes(point, space.first_blocks(point)))
    )


def with_largest(stage: EditStage, space: SizeSpace) -> EditStage:
    """The stage with the sizes of most bytes."""
    stored = SizeSpace(space.source, space.axes, Counter(space.source, "bytes"), space.limit)
    return with_point(stage, space, max(space.points, key=stored.takes))


def _check_axes(source: Outline, config: PruneConfig) -> None:
    sizes = source.spec.blocks[0].sizes
    if "kv_heads" in config.axes and sizes.heads == sizes.kv_heads:
        raise RecipeError(
            "axes has kv_heads, and each of the model's query heads has keys and values of its own;"
            " name heads alone"
        )
    if "experts" in config.axes and not sizes.experts:
        raise RecipeError("axes has experts, and the model is no mixture of experts; take it out")
    require_alike(source)


def _values(source: Outline, axis: Axis, config: PruneConfig, why_not: WhyNot) -> tuple[int, ...]:
    """Counts that can stay on an axis, ascending, the source's last."""
    whole = whole_of(source, axis)
    step = config.multiple_of if axis == "ffn" else 1
    reasons = {count: why_not(axis, count) for count in range(step, whole, step)}
    found = [count for count, reason in reasons.items() if reason is None]
    refused = next((reason for reason in reversed(reasons.values()) if reason), None)
    if not found and refused is not None:
        raise CheckpointError(f"axes has {axis}, on which nothing can go: {refused}")
    if not found:
        short = f" and multiple_of is {step}" if axis == "ffn" else ""
        raise RecipeError(f"axes has {axis}, of which the model has {whole}{short}; take it out")
    return (*found, whole)


def _why_not(recipe: Recipe, source: Outline) -> WhyNot:
    spec = source.spec
    # Of the first block, for which all others stand.
    rounded = [x for x in rounded_linears(recipe, spec) if x.linear in spec.blocks[0].linears]

    def asked(axis: Axis, count: int) -> str | None:
        if axis == "layers":  # any may go
            whole = len(spec.blocks)
            return _refusal(source, Shape(layers=tuple(range(whole - count, whole))))
        shape = widths_of(source, {axis: count})
        refusal = None if axis == "ffn" else _refusal(source, shape)
        return refusal or why_not_rounded(recipe, rounded, sizes_after(spec, shape).blocks[0])

    return asked


def _refusal(source: Outline, shape: Shape) -> str | None:
    try:
        resized(source.config, source.spec, shape)
    except CheckpointError as error:
        return str(error)
    return None


def limit_of(given: Outline, source: Outline, config: PruneConfig) -> int:
    """The budget as a number; arguments as of `space_of`. RecipeError for what saves nothing."""
    assert config.budget is not None, "the sizes are known"
    measure, amount = config.budget.asked
    whole, there = measured(given)[measure], measured(source)[measure]
    limit = int(amount * whole + 1e-9) if isinstance(amount, float) else amount
    if limit < there:
        return limit
    said = f"budget is {shown(measure, limit)}, and the source has {shown(measure, whole)}"
    read = "" if whole == there else f", the model that the stage reads {shown(measure, there)}"
    raise RecipeError(f"{said}{read}: nothing would be saved; give less")


def measured(model: Outline) -> Mapping[str, int]:
    """What a model takes, by each measure of a budget."""
    cache = Counter(model, "kv_bytes_per_token").of(Shape(), len(model.spec.blocks))
    return {"params": model.params, "bytes": model.file_bytes, "kv_bytes_per_token": cache}


def _out_of_reach(space: SizeSpace, given: Outline) -> str:
    """The nearest target, and what it would leave."""
    least, measure = space.takes(space.least), space.counter.measure
    whole = measured(given)[measure]
    left = " and ".join(_left(space))
    share = -(-1000 * least // whole) / 1000
    return (
        f"budget is {shown(measure, space.limit)} and the least is {shown(measure, least)}, a share"
        f" of {share:g}, with {left}; give that or more, or other axes"
    )


def _left(space: SizeSpace) -> Iterator[str]:
    for axis, values in space.axes.items():
        yield f"{axis} {values[0]}"


def shown(measure: str, amount: int) -> str:
    """An amount of a measure in words."""
    if measure == "params":
        return counted(amount, "parameter")
    return f"{size(amount)} ({amount} bytes)"
