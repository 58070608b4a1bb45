"""Which format a recipe's result is written in, and what that format cannot hold."""

from collections.abc import Iterable, Mapping

import torch

from compress.arch.spec import DecoderSpec
from compress.errors import RecipeError
from compress.formats import FORMATS, Format, dense
from compress.formats.bitsandbytes import codec as bitsandbytes
from compress.formats.compressed_tensors import encode as compressed_tensors
from compress.plan.layers import ModulePlan
from compress.plan.whole.file import NAME as GGUF
from compress.plan.whole.file import whole_stage
from compress.quant.scheme import QuantScheme
from compress.recipe import Recipe, Stage


def choose_format(recipe: Recipe) -> str:
    """Key of FORMATS for output.format, "auto" being what the schemes ask for.

    RecipeError when one of the stages has no place in it, and for a format of codes where no stage
    rounds to any.
    """
    asked = recipe.output.format
    if not recipe.stages:
        return _without_codes(recipe)
    if (stage := whole_stage(recipe)) is not None:
        return _of_whole(recipe, stage)
    if asked in FORMATS and asked not in (compressed_tensors.NAME, bitsandbytes.NAME):
        _refuse_schemes(recipe, FORMATS[asked])
        return asked
    schemes = [stage.scheme for stage in recipe.stages if stage.scheme is not None]
    outliers = [scheme for scheme in schemes if _has_outliers(scheme)]
    if asked == compressed_tensors.NAME and outliers:
        raise RecipeError(
            f"{recipe.at('output.format')}: {asked} has no outlier columns, which"
            f" {outliers[0].describe()} keeps; use {bitsandbytes.NAME}, auto or dense"
        )
    if asked == compressed_tensors.NAME or not (outliers or asked == bitsandbytes.NAME):
        return compressed_tensors.NAME
    conflict = bitsandbytes.why_not_together(schemes)
    if conflict is not None:
        whole = asked == bitsandbytes.NAME and not outliers
        remedy = "auto or dense" if whole else "dense, or a run for each of the two"
        raise RecipeError(
            f"{recipe.at('output.format')}: is {asked}, and {bitsandbytes.NAME} is refused:"
            f" {conflict}; use {remedy}"
        )
    return bitsandbytes.NAME


def _of_whole(recipe: Recipe, stage: Stage) -> str:
    """The format of a recipe whose stage rounds the whole model into one file."""
    if recipe.kv_cache is not None:
        raise RecipeError(
            f"{recipe.at('kv_cache')}: is {recipe.kv_cache!r}, and a GGUF file has no place for the"
            " scales of the cache; take it out"
        )
    if recipe.output.format not in ("auto", GGUF):
        raise RecipeError(
            f"{recipe.at('output.format')}: is {recipe.output.format}, and {stage.method} writes"
            f" a GGUF file; use {GGUF} or auto"
        )
    return GGUF


def _without_codes(recipe: Recipe) -> str:
    """The format of a recipe that only edits."""
    if recipe.kv_cache is not None:
        raise RecipeError(
            f"{recipe.at('kv_cache')}: is {recipe.kv_cache!r}, whose scales go with layers that a"
            " stage rounds; add one, or take it out"
        )
    if recipe.output.format not in ("auto", dense.NAME):
        raise RecipeError(
            f"{recipe.at('output.format')}: is {recipe.output.format}, and no stage rounds a layer;"
            f" use {dense.NAME} or auto"
        )
    return dense.NAME


def _refuse_schemes(recipe: Recipe, fmt: Format) -> None:
    for stage in recipe.stages:
        reason = None if stage.scheme is None else fmt.why_not(stage.scheme)
        if reason is not None:
            raise RecipeError(f"{recipe.at('output.format')}: is {fmt.name}: {reason}")


def scale_dtype(fmt: str, stored: torch.dtype) -> torch.dtype:
    """Dtype that a method chooses scales in, for a weight stored in `stored`: fp16 where the format
    has no other, so that none is changed when it is written. fp32 holds those of any source."""
    return torch.float16 if FORMATS[fmt].scale_dtype == "F16" else stored


def check_config(
    fmt: str,
    spec: DecoderSpec,
    shapes: Mapping[str, tuple[int, ...]],
    modules: Iterable[ModulePlan],
) -> None:
    """RecipeError for layers that a format holds one by one but not together."""
    modules = list(modules)
    FORMATS[fmt].config(
        spec,
        shapes,
        {m.linear.tensor: m.scheme for m in modules},
        with_g_idx=[m.linear.tensor for m in modules if m.g_idx],
    )


def check_experts(recipe: Recipe, modules: Iterable[ModulePlan], fmt: str) -> None:
    """RecipeError for experts of a mixture in a format that holds none.

    transformers keeps the experts of a block as one parameter, which bitsandbytes does not
    quantize: it would take their codes for weights.
    """
    if FORMATS[fmt].holds_experts:
        return
    expert = next((m for m in modules if m.linear.expert is not None), None)
    if expert is not None:
        raise RecipeError(
            f"{recipe.stages[expert.stage].at('targets')}: {expert.linear.name} is an expert, and"
            f" {fmt} quantizes none in transformers; add '*.experts.*' to ignore, or use"
            " output.format dense"
        )


def notes(modules: Iterable[ModulePlan], fmt: str) -> list[str]:
    """What a person should know about the planned size, and about what may end the run."""
    return FORMATS[fmt].remarks([m.scheme for m in modules])


def _has_outliers(scheme: QuantScheme) -> bool:
    return scheme.activation is not None and scheme.activation.outliers != "none"
