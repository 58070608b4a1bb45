"""Which pairs of a decoder a scaling stage may fold between, known before any work."""

from collections.abc import Iterator, Mapping

from compress.arch.spec import BlockSpec, DecoderSpec, FoldPair
from compress.errors import RecipeError
from compress.methods import METHODS
from compress.plan.layers import ModulePlan
from compress.recipe import Recipe, Stage
from compress.recipe.matching import scaled_as


def why_not_fold(
    pair: FoldPair, block: BlockSpec, planned: Mapping[str, ModulePlan], stage: Stage
) -> str | None:
    """Why a stage leaves a pair alone, None when it takes it. planned: modules by layer name.

    A router may stay dense: it reads the scaled channels all the same. Any other dense reader, or
    a dense linear as the writer, would have its scaled weight rounded to 16 bit for nothing.
    """
    # What a search would decline whatever it saw is known here, before weights are read for it.
    needs = METHODS[stage.method].needs(stage.config)
    if pair.kind == "linear" and needs.pairs == "norms":
        return "pairs is norms"
    for linear in block.linears:
        if linear.name not in pair.readers or linear.role == "router":
            continue
        m = planned.get(linear.name)
        if m is None or stage.index not in m.folds:
            return f"{stage.label} does not take {linear.name}, which reads it too"
    if pair.kind == "linear" and pair.writer not in planned:
        return f"{pair.writer} is not quantized"
    return None


def check_pairs(recipe: Recipe, spec: DecoderSpec, modules: list[ModulePlan]) -> None:
    """RecipeError for a scaling stage that finds nothing to scale."""
    planned = {m.linear.name: m for m in modules}
    for stage in recipe.stages:
        scales = METHODS[stage.method].fold is not None
        if not scales or scaled_as(recipe.stages, stage.index) != stage.index:
            continue
        reasons = list(_reasons(spec, planned, stage))
        if None in reasons:
            continue
        why = f"first reason: {reasons[0]}" if reasons else _no_pairs(spec)
        raise RecipeError(
            f"{stage.at('targets')}: {stage.method} has no norm or linear to scale between; {why}"
        )


def _reasons(
    spec: DecoderSpec, planned: Mapping[str, ModulePlan], stage: Stage
) -> Iterator[str | None]:
    return (why_not_fold(pair, b, planned, stage) for b in spec.blocks for pair in b.folds)


def _no_pairs(spec: DecoderSpec) -> str:
    return (
        f"model type {spec.model_type!r} is in no architecture table, so its pairs are not known;"
        " use gptq or rtn"
    )
