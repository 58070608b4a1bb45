"""What the row of FORMATS says of writing GGUF: no linear has a place of its own in a file that is
written whole. `compress_exporters.gguf` writes it, a room that imports this one."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from compress.arch.spec import DecoderSpec
from compress.checkpoint.shards.layout import Entry
from compress.errors import RecipeError
from compress.formats.storage import WeightStorage
from compress.quant.scheme import ActivationScheme, QuantScheme
from compress.quant.tensor import QuantizedTensor

NAME = "gguf"
REFUSAL = (
    "a GGUF file is written whole, by a stage k_quants or by `compress-model export --to gguf`"
)


def why_not(
    scheme: QuantScheme, shape: tuple[int, int] | None = None, *, g_idx: bool = False
) -> str:
    return REFUSAL


def layout(how: WeightStorage) -> list[Entry]:
    raise RecipeError(f"{how.name}: {REFUSAL}")


def encode(how: WeightStorage, tensor: QuantizedTensor) -> dict[str, Tensor]:
    raise RecipeError(f"{how.name}: {REFUSAL}")


def no_config(
    spec: DecoderSpec,
    shapes: Mapping[str, tuple[int, ...]],
    schemes: Mapping[str, QuantScheme],
    *,
    with_g_idx: Collection[str] = (),
    kv_cache: ActivationScheme | None = None,
) -> dict[str, Any] | None:
    """config.json is the original's; RecipeError for scales of a cache."""
    if kv_cache is not None:
        raise RecipeError("kv_cache: a GGUF file has no place for the scales of the cache")
    return None
