"""FORMATS: every way to store a compressed model, in one table; each row is a codec's functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from compress.arch.spec import DecoderSpec
from compress.checkpoint.layout import Entry
from compress.errors import RecipeError
from compress.formats import (
    awq_gemm,
    bitsandbytes,
    bitsandbytes_read,
    compressed_tensors,
    conv1d,
    ct_config,
    ct_decode,
    dense,
    gptq,
    gptq_v2,
    scheme_map,
)
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import QuantizedTensor

Has = Callable[[str], bool]
Read = Callable[[str], Tensor]
ShapeOf = Callable[[str], tuple[int, ...] | None]


def _itself(scheme: QuantScheme) -> QuantScheme:
    return scheme


def _asymmetric(scheme: QuantScheme) -> QuantScheme:
    """AWQ stores zero points of symmetric weights too."""
    return replace(scheme, symmetric=False)


def _block(block: Mapping[str, Any]) -> Mapping[str, Any]:
    return block


class Schemes(Protocol):
    """What a checkpoint's config says of its modules."""

    def scheme(self, module: str) -> QuantScheme | None:
        """How a module's weight is stored, None for as it is."""


@dataclass(frozen=True, slots=True)
class Reader:
    """How a quantized checkpoint is read.

    parts: what a quantized module's tensors are called below its path. marks: a module that has
        one of these is quantized. scales: those that hold scales, finite and positive; the first
        that is there is the weight's. g_idx: the one with the columns' groups.
    schemes(config): the scheme of every module; CheckpointError for what is malformed.
    decode(name, scheme, has, read): the weight of that original name.
    weight_shape(module, scheme, shape_of): its (N, K), from the shapes of the parts.
    as_read(scheme): what a written scheme reads back as, where that is another one.
    transposed(config): whether the original stores a module's weight as [K, N].
    lists_modules: the config says which modules are quantized, not only the tensors do.
    """

    parts: tuple[str, ...]
    marks: tuple[str, ...]
    scales: tuple[str, ...]
    schemes: Callable[[Mapping[str, Any]], Schemes]
    decode: Callable[[str, QuantScheme, Has, Read], QuantizedTensor]
    weight_shape: Callable[[str, QuantScheme, ShapeOf], tuple[int, int]]
    transposed: Callable[[Mapping[str, Any]], Callable[[str], bool]] = conv1d.by_config_or_family
    g_idx: str | None = None
    lists_modules: bool = True
    as_read: Callable[[QuantScheme], QuantScheme] = _itself


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
    files: small files that repeat the quantization_config for some loaders, each with how it
        follows from that.
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
    files: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = field(
        default_factory=dict
    )
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


_QUANTIZE_CONFIG = {"quantize_config.json": _block}

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
                scales=("weight_scale", "weight_global_scale", "input_scale"),
                schemes=scheme_map.parse,
                decode=ct_decode.decode,
                weight_shape=ct_decode.weight_shape,
                transposed=conv1d.by_config,
                g_idx="weight_g_idx",
            ),
            holds_cache=True,
        ),
        "gptq": Format(
            name="gptq",
            method=gptq.NAME,
            against=gptq.against,
            layout=gptq.layout,
            encode=gptq.encode,
            config=gptq.quantization_config,
            reader=Reader(
                parts=gptq.PARTS,
                marks=("qweight", "scales"),
                scales=("scales",),
                schemes=gptq.read_schemes,
                decode=gptq.decode,
                weight_shape=gptq.weight_shape,
                g_idx="g_idx",
                lists_modules=False,
            ),
            scale_dtype="F16",
            files=_QUANTIZE_CONFIG,
        ),
        "gptq_v2": Format(
            name="gptq_v2",
            method=gptq_v2.NAME,
            against=gptq_v2.against,
            layout=gptq_v2.layout,
            encode=gptq_v2.encode,
            config=gptq_v2.quantization_config,
            reader=Reader(
                parts=gptq_v2.PARTS,
                marks=("qweight", "scales"),
                scales=("scales",),
                schemes=gptq_v2.read_schemes,
                decode=gptq_v2.decode,
                weight_shape=gptq_v2.weight_shape,
                g_idx="g_idx",
                lists_modules=False,
            ),
            scale_dtype="F16",
            files=_QUANTIZE_CONFIG,
        ),
        "awq": Format(
            name="awq",
            method=awq_gemm.NAME,
            against=awq_gemm.against,
            layout=awq_gemm.layout,
            encode=awq_gemm.encode,
            config=awq_gemm.quantization_config,
            reader=Reader(
                parts=awq_gemm.PARTS,
                marks=("qweight", "scales"),
                scales=("scales",),
                schemes=awq_gemm.read_schemes,
                decode=awq_gemm.decode,
                weight_shape=awq_gemm.weight_shape,
                as_read=_asymmetric,
            ),
            scale_dtype="F16",
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
                scales=("SCB",),
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


def small_files() -> frozenset[str]:
    """Names of all files that repeat a quantization_config, in any format and of any tool."""
    ours = [name for fmt in FORMATS.values() for name in fmt.files]
    return frozenset((*ours, "quantize_config.json", "quant_config.json", "hf_quant_config.json"))


def readable() -> str:
    """The formats that can be read, for a message."""
    found = dict.fromkeys(f.method for f in FORMATS.values() if f.method is not None)
    names = [f"8-bit {m}" if m == bitsandbytes.NAME else m for m in found]
    return f"dense, {', '.join(names[:-1])} and {names[-1]}"
