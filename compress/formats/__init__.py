"""Checkpoint codecs: how a QuantizedTensor is laid out in a file that other runtimes read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from compress.arch.spec import DecoderSpec
from compress.checkpoint.layout import Entry
from compress.errors import RecipeError
from compress.formats import bitsandbytes, compressed_tensors, ct_config, dense
from compress.formats.detect import detect
from compress.formats.kv_cache import FP8_CACHE, INT8_CACHE, kv_encode, kv_layout
from compress.formats.runtimes import runtimes
from compress.formats.verdicts import Verdict
from compress.formats.weights import Weights, logical_shapes, open_weights


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write a compressed model.

    layout(name, (n, k), scheme, scale_dtype_code, *, act_order=False, transposed=False): exact
        (name, dtype code, shape) of what `encode` returns, known before any work.
    encode(name, tensor, *, dtype=None, transposed=False): the tensors to write for one weight.
    config(spec, shapes, schemes, *, with_g_idx=(), kv_cache=None): the quantization_config, None
        without one.
    """

    name: str
    layout: Callable[..., list[Entry]]
    encode: Callable[..., dict[str, Tensor]]
    config: Callable[..., dict[str, Any] | None]


def _no_config(
    spec: DecoderSpec,
    shapes: Mapping[str, tuple[int, ...]],
    schemes: Mapping[str, object],
    *,
    with_g_idx: object = (),
    kv_cache: object = None,
) -> None:
    """A dense checkpoint needs no word to its loader; RecipeError for scales of a cache."""
    if kv_cache is not None:
        raise RecipeError(
            "kv_cache: a dense checkpoint has no place for the scales of the key/value cache; use"
            f" output.format {compressed_tensors.NAME!r}"
        )


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "compressed-tensors": Format(
            compressed_tensors.NAME,
            compressed_tensors.layout,
            compressed_tensors.encode,
            ct_config.quantization_config,
        ),
        "bitsandbytes": Format(
            bitsandbytes.NAME,
            bitsandbytes.layout,
            bitsandbytes.encode,
            bitsandbytes.quantization_config,
        ),
        "dense": Format(dense.NAME, dense.layout, dense.encode, _no_config),
    }
)

__all__ = [
    "FORMATS",
    "FP8_CACHE",
    "INT8_CACHE",
    "Format",
    "Verdict",
    "Weights",
    "detect",
    "kv_encode",
    "kv_layout",
    "logical_shapes",
    "open_weights",
    "runtimes",
]
