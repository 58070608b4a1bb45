"""Calibrated scales of the key/value cache: which, and where they will lie."""

from collections.abc import Mapping
from types import MappingProxyType

from compress.arch.cache_size import CacheSize, cache_size
from compress.arch.spec import DecoderSpec
from compress.checkpoint.outline import Outline
from compress.checkpoint.shards.dtype_codes import itemsize
from compress.checkpoint.shards.layout import Entry
from compress.errors import RecipeError
from compress.formats import FORMATS, FP8_CACHE, INT8_CACHE
from compress.formats.kv_cache import scales_in
from compress.formats.weights import Weights
from compress.quant.scheme import ActivationScheme
from compress.recipe import Recipe

SCHEMES: Mapping[str, ActivationScheme] = MappingProxyType({"fp8": FP8_CACHE, "int8": INT8_CACHE})


def scheme(recipe: Recipe) -> ActivationScheme | None:
    """How the recipe has runtimes store keys and values, None for as they are."""
    return None if recipe.kv_cache is None else SCHEMES[recipe.kv_cache]


def cache_of(weights: Weights) -> CacheSize:
    """What a runtime's cache takes for keys and values.

    In the dtype of what the checkpoint does not quantize; in one byte a number where it has scales.
    """
    spec, checkpoint = weights.spec, weights.checkpoint
    scaled = () if weights.kv_cache is None else spec.blocks
    quantized = {b.index for b in scaled if scales_in(b, checkpoint.tensors) is not None}
    return cache_size(checkpoint.config, spec, weights.plain_dtype.itemsize, quantized)


def dense_cache(model: Outline) -> CacheSize:
    """As `cache_of`, of a dense model."""
    width = itemsize(model.tensors[model.spec.embedding].dtype)
    return cache_size(model.config, model.spec, width)


def planned_cache(recipe: Recipe, model: Outline) -> CacheSize:
    """As `cache_of`, of what the recipe's rounding stages make of a dense model."""
    width = itemsize(model.tensors[model.spec.embedding].dtype)
    quantized = () if recipe.kv_cache is None else range(len(model.spec.blocks))
    return cache_size(model.config, model.spec, width, quantized)


def reserve(
    recipe: Recipe,
    spec: DecoderSpec,
    dtype: str,
    tensors: Mapping[str, tuple[Entry, ...]],
    fmt: str,
) -> dict[str, tuple[Entry, ...]]:
    """The output's entries with the scales of every block beside its key projection.

    dtype: code in which they are stored. RecipeError where the format or a block has no place.
    """
    places = FORMATS[fmt].cache
    if places is None or not places.in_runs:
        able = (name for name, f in FORMATS.items() if f.cache is not None and f.cache.in_runs)
        raise RecipeError(
            f"{recipe.at('kv_cache')}: is {recipe.kv_cache!r}, which format {fmt!r} has no place"
            f" for; {' and '.join(able)} has"
        )
    out = dict(tensors)
    scales = places.layout(spec, dtype)
    for i, block in enumerate(spec.blocks):
        owner = next(x.tensor for x in block.linears if x.role in ("k", "qkv"))
        out[owner] = (*out[owner], *scales[2 * i : 2 * i + 2])
    return out
