"""A format of checkpoints as one value: the functions of its codec, and how it is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from compress.arch.spec import BlockSpec, DecoderSpec
from compress.checkpoint.shards.layout import Entry
from compress.formats import conv1d
from compress.formats.compressed_tensors import decode as ct_decode
from compress.formats.stored import Beside, Has, Parts, Read, ShapeOf, Stored
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import InputQuantization, QuantizedTensor

CacheLayout = Callable[[DecoderSpec, str], list[Entry]]
CacheEncode = Callable[[BlockSpec, Tensor, Tensor], dict[str, Tensor]]


def _never(block: Mapping[str, Any]) -> bool:
    return False


def _never_reorders(schemes: object, module: str) -> bool:
    return False


def _no_zeros(zero: Tensor, scheme: QuantScheme) -> int:
    return 0


def _itself(scheme: QuantScheme) -> QuantScheme:
    return scheme


class Schemes(Protocol):
    """What a checkpoint's config says of its modules."""

    def scheme(self, module: str) -> QuantScheme | None:
        """How a module's weight is stored, None for as it is."""


@dataclass(frozen=True, slots=True)
class Reader:
    """How a quantized checkpoint is read.

    parts: what a quantized module's tensors are called below its path. marks: a module that has
        one of these is quantized. scales: those that hold scales; the first that is there is
        the weight's. g_idx: the one with the columns' groups.
    schemes(config): the scheme of every module; CheckpointError for what is malformed.
    decode(name, scheme, has, read): the weight of that original name.
    gather(stored): all tensors of a module, by part; CheckpointError for those that are missing or
        do not fit. It does with tensors without values, but of `sizes`.
    beside(stored, parts): what a weight has beside codes and scales, checked by value; does without
        values of `large`.
    weight_shape(module, scheme, shape_of): its (N, K), from the shapes of the parts.
    as_read(scheme): what a written scheme reads back as, where that is another one.
    inputs(module, scheme, has, read): how the inputs of a module are quantized.
    transposed(config): whether the original stores a module's weight as [K, N].
    large: the parts with codes and scales. sizes: those whose values tell others' shapes.
    reorders(schemes, module): whether the config promises an order of columns (g_idx).
    lists_modules: the config says which modules are quantized, not only the tensors do.
    skips_head(block): whether loaders leave an output head alone that the quantization_config does
        not list.
    """

    parts: tuple[str, ...]
    marks: tuple[str, ...]
    scales: tuple[str, ...]
    schemes: Callable[[Mapping[str, Any]], Schemes]
    decode: Callable[[str, QuantScheme, Has, Read], QuantizedTensor]
    gather: Callable[[Stored], Parts]
    beside: Callable[[Stored, Parts], Beside]
    large: tuple[str, ...]
    weight_shape: Callable[[str, QuantScheme, ShapeOf], tuple[int, int]]
    sizes: tuple[str, ...] = ()
    inputs: Callable[[str, QuantScheme, Has, Read], InputQuantization | None] = ct_decode.inputs
    transposed: Callable[[Mapping[str, Any]], Callable[[str], bool]] = conv1d.by_config_or_family
    g_idx: str | None = None
    lists_modules: bool = True
    skips_head: Callable[[Mapping[str, Any]], bool] = _never
    as_read: Callable[[QuantScheme], QuantScheme] = _itself
    reorders: Callable[[Any, str], bool] = _never_reorders


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write a compressed model.

    name: its key in FORMATS. method: config.json's `quant_method`, None for a dense checkpoint.
    why_not(scheme, (n, k) or None, *, g_idx=False): why it cannot hold a weight and the nearest
        thing that can; None when it can.
    layout(name, (n, k), scheme, scale_dtype_code, *, act_order=False, transposed=False): exact
        (name, dtype code, shape) of what `encode` returns, known before any work.
    encode(name, tensor, *, dtype=None, transposed=False): the tensors to write for one weight.
    config(spec, shapes, schemes, *, with_g_idx=(), kv_cache=None): the quantization_config, None
        without one.
    reader: None for a dense checkpoint.
    scale_dtype: code of the only dtype that it has for scales, None where it takes those it gets.
    files: small files that repeat the quantization_config for some loaders, each with how it
        follows from that.
    unstorable(zero, scheme): how many of a weight's zero points (int8) it has no place for.
    cache: (layout(spec, scale_dtype_code), encode(block, k, v)) of the key/value cache's scales,
        None where it has no place for them.
    """

    name: str
    method: str | None
    why_not: Callable[..., str | None]
    layout: Callable[..., list[Entry]]
    encode: Callable[..., dict[str, Tensor]]
    config: Callable[..., dict[str, Any] | None]
    reader: Reader | None
    scale_dtype: str | None = None
    files: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = field(
        default_factory=dict
    )
    unstorable: Callable[[Tensor, QuantScheme], int] = _no_zeros
    cache: tuple[CacheLayout, CacheEncode] | None = None
