"""Calibrated scales of the key/value cache: which, and where they will lie."""

from collections.abc import Mapping
from types import MappingProxyType

from compress.arch.spec import DecoderSpec
from compress.checkpoint.layout import Entry
from compress.errors import RecipeError
from compress.formats import FP8_CACHE, INT8_CACHE, kv_layout
from compress.quant.scheme import ActivationScheme
from compress.recipe import Recipe

SCHEMES: Mapping[str, ActivationScheme] = MappingProxyType({"fp8": FP8_CACHE, "int8": INT8_CACHE})
FORMAT = "compressed-tensors"


def scheme(recipe: Recipe) -> ActivationScheme | None:
    """How the recipe has runtimes store keys and values, None for as they are."""
    return None if recipe.kv_cache is None else SCHEMES[recipe.kv_cache]


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
    if fmt != FORMAT:
        raise RecipeError(
            f"{recipe.at('kv_cache')}: is {recipe.kv_cache!r}, which format {fmt!r} has no place"
            f" for; {FORMAT} has"
        )
    out = dict(tensors)
    scales = kv_layout(spec, dtype)
    for i, block in enumerate(spec.blocks):
        owner = next(x.tensor for x in block.linears if x.role in ("k", "qkv"))
        out[owner] = (*out[owner], *scales[2 * i : 2 * i + 2])
    return out
