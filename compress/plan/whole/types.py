"""Types that a stage gives to layers by name, in place of those of its mixture."""

from compress.arch.spec import DecoderSpec
from compress.errors import RecipeError
from compress.methods.k_quants import KQuantsStageConfig
from compress.quant.ggml_mixtures import type_of
from compress.recipe import Stage
from compress.recipe.reading.patterns import meaning


def types_of(stage: Stage, spec: DecoderSpec) -> dict[str, str]:
    """By weight; the first pattern that names a layer counts. RecipeError for one that names
    none."""
    config, found = stage.config, dict[str, str]()
    assert isinstance(config, KQuantsStageConfig), "no other method rounds whole models"
    for i, each in enumerate(config.types):
        kind = type_of(each.type, "type")
        for j, pattern in enumerate(each.layers):
            place = stage.at(f"types[{i}].layers[{j}]")
            means = meaning(pattern, place)
            named = [x for x in spec.all_linears() if means(x)]
            if not named:
                raise RecipeError(
                    f"{place}: {pattern!r} names no layer of the model; `inspect` lists them"
                )
            for linear in named:
                found.setdefault(linear.tensor, kind)
    return found
