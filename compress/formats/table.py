"""FORMATS: every way to store a compressed model, in one table; each row is a codec's functions."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from compress.arch.spec import DecoderSpec
from compress.checkpoint.quant_file import HF_QUANT_CONFIG, PACKED_FILES
from compress.errors import RecipeError
from compress.formats import conv1d, dense, kv_cache
from compress.formats.awq import codec as awq
from compress.formats.bitsandbytes import codec as bitsandbytes
from compress.formats.bitsandbytes import config_read as bitsandbytes_config
from compress.formats.compressed_tensors import config as ct_config
from compress.formats.compressed_tensors import config_read as ct_config_read
from compress.formats.compressed_tensors import decode as ct_decode
from compress.formats.compressed_tensors import encode as compressed_tensors
from compress.formats.format import CacheScales, FileReader, Format, OutlierFile, Reader
from compress.formats.fp8 import codec as fp8
from compress.formats.gguf import decode as gguf_decode
from compress.formats.gguf import matching as gguf_matching
from compress.formats.gguf import row as gguf
from compress.formats.gptq import codec as gptq
from compress.formats.gptq import config as gptq_config
from compress.formats.gptq import version2 as gptq_v2
from compress.formats.modelopt import decode as modelopt_decode
from compress.formats.modelopt import encode as modelopt
from compress.quant.scheme import QuantScheme


def _asymmetric(scheme: QuantScheme) -> QuantScheme:
    """AWQ stores zero points of symmetric weights too."""
    return replace(scheme, symmetric=False)


def _block(block: Mapping[str, Any]) -> Mapping[str, Any]:
    return block


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


def _always(block: Mapping[str, Any]) -> bool:
    """AWQ's loaders do, whatever is listed."""
    return True


def _lists_none(key: str) -> Callable[[Mapping[str, Any]], bool]:
    """transformers leaves heads alone where the list of dense modules is null."""
    return lambda block: block.get(key) is None


_QUANTIZE_CONFIG = {"quantize_config.json": _block}

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "compressed-tensors": Format(
            name="compressed-tensors",
            method=compressed_tensors.NAME,
            why_not=compressed_tensors.why_not,
            layout=compressed_tensors.layout,
            encode=compressed_tensors.encode,
            config=ct_config.quantization_config,
            reader=Reader(
                parts=compressed_tensors.PARTS,
                marks=("weight_scale", "weight_packed"),
                scales=("weight_scale", "weight_global_scale", "input_scale"),
                schemes=ct_config_read.parse,
                decode=ct_decode.decode,
                gather=ct_decode.gather,
                beside=ct_decode.beside,
                large=("weight_packed", "weight", "weight_scale"),
                weight_shape=ct_decode.weight_shape,
                sizes=("weight_shape",),
                transposed=conv1d.by_config,
                g_idx="weight_g_idx",
                reorders=ct_config_read.SchemeMap.reorders,
            ),
            cache=CacheScales(kv_cache.kv_layout, kv_cache.kv_encode, in_runs=True),
            decoded_first=True,
        ),
        "gptq": Format(
            name="gptq",
            method=gptq.NAME,
            why_not=gptq.why_not,
            layout=gptq.layout,
            encode=gptq.encode,
            config=gptq.quantization_config,
            reader=Reader(
                parts=gptq.PARTS,
                marks=("qweight", "scales"),
                scales=("scales",),
                schemes=gptq.read_schemes,
                decode=gptq.decode,
                gather=gptq.gather,
                beside=gptq.beside,
                large=gptq.LARGE,
                weight_shape=gptq.weight_shape,
                g_idx="g_idx",
                reorders=gptq_config.GptqSchemes.reorders,
                lists_modules=False,
            ),
            scale_dtype="F16",
            files=_QUANTIZE_CONFIG,
            unstorable=gptq.unstorable,
            remarks=gptq.remarks,
        ),
        "gptq_v2": Format(
            name="gptq_v2",
            method=gptq_v2.NAME,
            why_not=gptq_v2.why_not,
            layout=gptq_v2.layout,
            encode=gptq_v2.encode,
            config=gptq_v2.quantization_config,
            reader=Reader(
                parts=gptq_v2.PARTS,
                marks=("qweight", "scales"),
                scales=("scales",),
                schemes=gptq_v2.read_schemes,
                decode=gptq_v2.decode,
                gather=gptq_v2.gather,
                beside=gptq_v2.beside,
                large=gptq.LARGE,
                weight_shape=gptq_v2.weight_shape,
                g_idx="g_idx",
                reorders=gptq_config.GptqSchemes.reorders,
                lists_modules=False,
            ),
            scale_dtype="F16",
            files=_QUANTIZE_CONFIG,
        ),
        "awq": Format(
            name="awq",
            method=awq.NAME,
            why_not=awq.why_not,
            layout=awq.layout,
            encode=awq.encode,
            config=awq.quantization_config,
            reader=Reader(
                parts=awq.PARTS,
                marks=("qweight", "scales"),
                scales=("scales",),
                schemes=awq.read_schemes,
                decode=awq.decode,
                gather=awq.gather,
                beside=awq.beside,
                large=gptq.LARGE,
                weight_shape=awq.weight_shape,
                as_read=_asymmetric,
                skips_head=_always,
            ),
            scale_dtype="F16",
        ),
        "fp8": Format(
            name="fp8",
            method=fp8.NAME,
            why_not=fp8.why_not,
            layout=fp8.layout,
            encode=fp8.encode,
            config=fp8.quantization_config,
            reader=Reader(
                parts=("weight", *fp8.PARTS),
                marks=fp8.SCALES,
                scales=fp8.PARTS,
                schemes=fp8.read_schemes,
                decode=fp8.decode,
                gather=fp8.gather,
                beside=fp8.beside,
                large=("weight", *fp8.SCALES),
                weight_shape=fp8.weight_shape,
                inputs=fp8.inputs,
                skips_head=_lists_none("modules_to_not_convert"),
            ),
            scale_dtype="F32",
        ),
        "modelopt": Format(
            name="modelopt",
            method=modelopt.NAME,
            why_not=modelopt.why_not,
            layout=modelopt.layout,
            encode=modelopt.encode,
            config=modelopt.quantization_config,
            reader=Reader(
                parts=("weight", *modelopt.PARTS),
                marks=modelopt.SCALES,
                scales=("weight_scale", "weight_scale_2", "input_scale"),
                factor="pre_quant_scale",
                schemes=modelopt.read_schemes,
                decode=modelopt_decode.decode,
                gather=modelopt_decode.gather,
                beside=modelopt_decode.beside,
                large=("weight", *modelopt.SCALES),
                weight_shape=modelopt_decode.weight_shape,
                inputs=modelopt_decode.inputs,
            ),
            scale_dtype="F32",
            files={HF_QUANT_CONFIG: modelopt.side_file},
            cache=CacheScales(modelopt.kv_layout, modelopt.kv_encode, in_runs=False),
        ),
        "bitsandbytes": Format(
            name="bitsandbytes",
            method=bitsandbytes.NAME,
            why_not=bitsandbytes.why_not,
            layout=bitsandbytes.layout,
            encode=bitsandbytes.encode,
            config=bitsandbytes.quantization_config,
            reader=Reader(
                parts=bitsandbytes.PARTS,
                marks=("SCB",),
                scales=("SCB",),
                schemes=bitsandbytes_config.read_schemes,
                decode=bitsandbytes.decode,
                gather=bitsandbytes.gather,
                beside=bitsandbytes.beside,
                large=("weight", "SCB"),
                weight_shape=bitsandbytes_config.weight_shape,
                skips_head=_lists_none("llm_int8_skip_modules"),
            ),
            scale_dtype="F32",
            outliers=OutlierFile(
                bitsandbytes.FOLDER,
                bitsandbytes.SIDE_NAME,
                bitsandbytes.outlier_names,
                bitsandbytes.encode_outliers,
            ),
            remarks=bitsandbytes.remarks,
            why_not_split="vLLM splits no bitsandbytes checkpoint that is quantized already",
            holds_experts=False,
        ),
        "gguf": Format(
            name="gguf",
            method=gguf.NAME,
            why_not=gguf.why_not,
            layout=gguf.layout,
            encode=gguf.encode,
            config=gguf.no_config,
            reader=None,
            file=FileReader(gguf_matching.match, gguf_decode.decode),
        ),
        "dense": Format(
            name="dense",
            method=None,
            why_not=dense.why_not,
            layout=dense.layout,
            encode=dense.encode,
            config=_no_config,
            reader=None,
        ),
    }
)

# Those that weights are converted to one by one.
CODECS: Mapping[str, Format] = MappingProxyType(
    {k: x for k, x in FORMATS.items() if x.file is None}
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
    return frozenset((*ours, *PACKED_FILES, HF_QUANT_CONFIG))


def readable() -> str:
    """The formats that can be read, for a message."""
    found = dict.fromkeys(f.method for f in FORMATS.values() if f.method is not None)
    names = [f"8-bit {m}" if m == bitsandbytes.NAME else m for m in found]
    return f"dense, {', '.join(names[:-1])} and {names[-1]}"
