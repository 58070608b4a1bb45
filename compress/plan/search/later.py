"""Which sizes later stages take: the groups and formats of those that round."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from compress.arch.sizes import BlockSizes
from compress.arch.spec import DecoderSpec, LinearSpec
from compress.checkpoint.outline import Outline
from compress.formats import FORMATS
from compress.methods import METHODS
from compress.plan.budget import budget_units, one_by_one, with_choice
from compress.plan.checks import checked_layers
from compress.plan.output_format import check_config, choose_format
from compress.quant.scheme import QuantScheme
from compress.recipe import Recipe
from compress.recipe.matching import select
from compress.recipe.placing import placed


@dataclass(frozen=True, slots=True)
class Rounded:
    """A linear that a stage rounds. schemes: those that it may have. g_idx: its columns may be
    grouped in another order."""

    linear: LinearSpec
    schemes: tuple[QuantScheme, ...]
    g_idx: bool


def rounded_linears(recipe: Recipe, spec: DecoderSpec) -> Iterator[Rounded]:
    """All of a decoder, stage by stage."""
    linears = {x.name: x for x in spec.all_linears()}
    for stage in recipe.stages:
        schemes = stage.candidates or (() if stage.scheme is None else (stage.scheme,))
        g_idx = METHODS[stage.method].needs(stage.config).g_idx
        for name in select(stage, tuple(linears.values()))[0] if schemes else ():
            yield Rounded(linears[name], schemes, g_idx)


def format_of(recipe: Recipe) -> str:
    """The format of the result, whichever of their candidates the stages take."""
    return choose_format(replace(recipe, stages=tuple(one_by_one(recipe.stages))))


def check_rounded(recipe: Recipe, model: Outline) -> None:
    """Errors of a plan whose stages do not round the layers of a model, or have no format that
    holds them; with targets, in the smallest of their candidates."""
    if not recipe.stages:
        return
    units = budget_units(recipe, model)
    settled = with_choice(recipe, units, None)[0] if units else recipe
    fmt = choose_format(settled)
    modules, _ = checked_layers(settled, model, fmt)
    with placed(recipe, "output.format"):
        check_config(fmt, model.spec, model.shapes, modules)


def why_not_rounded(recipe: Recipe, rounded: Sequence[Rounded], sizes: BlockSizes) -> str | None:
    """Why a stage does not take a block of these sizes; None where all do. rounded: of a block."""
    if not rounded:
        return None
    fmt = format_of(recipe)
    for each in rounded:
        shape = _shape(each.linear, sizes)
        found = [_why_not(scheme, shape, fmt, g_idx=each.g_idx) for scheme in each.schemes]
        if all(found):
            return f"{each.linear.name} would have {shape[0]} rows and {shape[1]} columns: " + str(
                found[0]
            )
    return None


def _shape(linear: LinearSpec, sizes: BlockSizes) -> tuple[int, int]:
    """Rows and columns of a linear in a block of other sizes."""
    inner = sizes.expert if linear.expert is not None else sizes.intermediate
    rows = {x: sizes.of(x) for x in ("q", "k", "v", "qkv")}
    rows |= {"gate": inner, "up": inner, "gate_up": 2 * inner}
    columns = {"o": sizes.of("attended"), "down": inner}
    outputs, inputs = linear.shape
    return rows.get(linear.role, outputs), columns.get(linear.role, inputs)


def _why_not(scheme: QuantScheme, shape: tuple[int, int], fmt: str, *, g_idx: bool) -> str | None:
    steps, inputs = [scheme.columns_per_scale(shape[1])], scheme.activation
    if inputs is not None and inputs.granularity == "group":
        steps.append(inputs.group_size)
    broken = next((step for step in steps if shape[1] % step), None)
    if broken is not None:
        return f"no multiple of {broken}, which {scheme.describe()} has a scale for"
    return FORMATS[fmt].why_not(scheme, shape, g_idx=g_idx)
