"""FORMATS: every way to store a compressed model, in one table; each row is a codec's functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from compress.arch.spec import DecoderSpec
from compress.checkpoint.layout import Entry
from compress.errors import RecipeError
from compress.formats import (
    bitsandbytes,
    bitsandbytes_read,
    compressed_tensors,
    conv1d,
    ct_config,
    ct_decode,
    dense,
    scheme_map,
)
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import QuantizedTensor

Has = Callable[[str], bool]
Read = Callable[[str], Tensor]
ShapeOf = Callable[[str], tuple[int, ...] | None]


class Schemes(Protocol):
    """What a checkpoint's config says of its modules."""

    def scheme(self, module: str) -> QuantScheme | None:
        """How a module's weight is stored, None for as it is."""


@dataclass(frozen=True, slots=True)
class Reader:
    """How a quantized checkpoint is read.

    parts: what a quantized module's tensors are called below its path. marks: those of them with
        the weight's scales; a module that has one of them is quantized. positive: all that hold
        finite, positive numbers. g_idx: the one with the columns' groups.
    schemes(config): the scheme of every module; CheckpointError for what is malformed.
    decode(name, scheme, has, read): the weight of that original name.
    weight_shape(module, scheme, shape_of): its (N, K), from the shapes of the parts.
    transposed(config): whether the original stores a module's weight as [K, N].
    lists_modules: the config says which modules are quantized, not only the tensors do.
    """

    parts: tuple[str, ...]
    marks: tuple[str, ...]
    positive: tuple[str, ...]
    schemes: Callable[[Mapping[str, Any]], Schemes]
    decode: Callable[[str, QuantScheme, Has, Read], QuantizedTensor]
    weight_shape: Callable[[str, QuantScheme, ShapeOf], tuple[int, int]]
    transposed: Callable[[Mapping[str, Any]], Callable[[str], bool]] = conv1d.by_config_or_family
    g_idx: str | None = None
    lists_modules: bool = True


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write a compressed model.

    name: its key in FORMATS. method: config.json's `quant_method`, None for a dense checkpoint.
    against(scheme, (n, k) or None, *, g_idx=False): why it cannot hold a weight and the nearest
        thing that can; None when it can.
    layout(name, (n, k), scheme, scale_dtype_code, *, act_order=False, transposed=False): exact
        (name, dtype code, shape) of what `encode` returns, known before any work.
    encode(name, tensor, *, dtype=None, transposed=False): the tensors to write for one weight.
    config(spec, shapes, schemes, *, with_g_idx=(), kv_cache=None): the quantization_config, None
        without one.
    reader: None for a dense checkpoint.
    scale_dtype: code of the only dtype that it has for scales, None where it takes those it gets.
    files: names of small files that repeat the quantization_config for some loaders.
    holds_cache: it has a place for scales of the key/value cache.
    """

    name: str
    method: str | None
    against: Callable[..., str | None]
    layout: Callable[..., list[Entry]]
    encode: Callable[..., dict[str, Tensor]]
    config: Callable[..., dict[str, Any] | None]
    reader: Reader | None
    scale_dtype: str | None = None
    files: tuple[str, ...] = ()
    holds_cache: bool = False


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
            name="compressed-tensors",
            method=compressed_tensors.NAME,
            against=compressed_tensors.against,
            layout=compressed_tensors.layout,
            encode=compressed_tensors.encode,
            config=ct_config.quantization_config,
            reader=Reader(
                parts=compressed_tensors.PARTS,
                marks=("weight_scale",),
                positive=("weight_scale", "weight_global_scale", "input_scale"),
                schemes=scheme_map.parse,
                decode=ct_decode.decode,
                weight_shape=ct_decode.weight_shape,
                transposed=conv1d.by_config,
                g_idx="weight_g_idx",
            ),
            holds_cache=True,
        ),
        "bitsandbytes": Format(
            name="bitsandbytes",
            method=bitsandbytes.NAME,
            against=bitsandbytes.against,
            layout=bitsandbytes.layout,
            encode=bitsandbytes.encode,
            config=bitsandbytes.quantization_config,
            reader=Reader(
                parts=bitsandbytes.PARTS,
                marks=("SCB",),
                positive=("SCB",),
                schemes=bitsandbytes_read.read_schemes,
                decode=bitsandbytes.decode,
                weight_shape=bitsandbytes_read.weight_shape,
            ),
            scale_dtype="F32",
        ),
        "dense": Format(
            name="dense",
            method=None,
            against=dense.against,
            layout=dense.layout,
            encode=dense.encode,
            config=_no_config,
            reader=None,
        ),
    }
)


def by_method(method: str) -> tuple[Format, Reader] | None:
    """The format that a `quant_method` means, with its reader; None for one that we do not read."""
    for fmt in FORMATS.values():
        if fmt.method == method and fmt.reader is not None:
            return fmt, fmt.reader
    return None


def readable() -> str:
    """The formats that can be read, for a message."""
    found = dict.fromkeys(f.method for f in FORMATS.values() if f.method is not None)
    names = [f"8-bit {m}" if m == bitsandbytes.NAME else m for m in found]
    return f"dense, {', '.join(names[:-1])} and {names[-1]}"
