"""ModelOpt's quantization configs, written and read: the block in config.json, which vLLM and
SGLang read, and hf_quant_config.json, which TensorRT-LLM reads.

The block names an algorithm, the modules that stay dense (`ignore`, with * and ? as wildcards) and
the cache; for "MIXED_PRECISION" every quantized module with its algorithm. ModelOpt itself writes
the group size of W4A16_AWQ to hf_quant_config.json only; we write it to both.
"""

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from compress.arch.spec import DecoderSpec
from compress.checkpoint.detect import find_block
from compress.checkpoint.quant_file import HF_QUANT_CONFIG
from compress.errors import CheckpointError, RecipeError
from compress.formats import config_values as values
from compress.formats.compressed_tensors.config import ignored_modules
from compress.formats.compressed_tensors.config_read import SchemeMap
from compress.formats.conv1d import names_in
from compress.formats.kv_cache import FP8_CACHE, INT8_CACHE
from compress.formats.names import module_of
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme

NAME = "modelopt"
MIXED = "MIXED_PRECISION"
# The version whose exports these are like; loaders recognise hf_quant_config.json by the name.
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}
_CACHES = MappingProxyType({"FP8": FP8_CACHE, "INT8": INT8_CACHE})
_AWQ = "W4A16_AWQ"

# Algorithm -> how it stores a weight. W4A16_AWQ comes with groups of any size.
ALGORITHMS: Mapping[str, QuantScheme] = MappingProxyType(
    {
        "FP8": PRESETS["FP8"],
        "FP8_PER_CHANNEL_PER_TOKEN": PRESETS["FP8_DYNAMIC"],
        "FP8_PB_WO": replace(PRESETS["FP8_BLOCK"], activation=None),
        "W4A16_NVFP4": PRESETS["NVFP4A16"],
        _AWQ: PRESETS["W4A16"],
        "W8A16": PRESETS["W8A16"],
        "W8A8_SQ_PER_CHANNEL": PRESETS["W8A8_STATIC"],
    }
)
# NVFP4 rounds inputs to FP4 as well, which no scheme of ours says: read as weights, not written.
_READABLE = MappingProxyType({**ALGORITHMS, "NVFP4": PRESETS["NVFP4A16"]})


def algorithm(scheme: QuantScheme) -> str | None:
    """The algorithm that stores weights of a scheme; None when there is none."""
    for name, known in ALGORITHMS.items():
        size = scheme.group_size if name == _AWQ and scheme.granularity == "group" else None
        if scheme == (known if size is None else replace(known, group_size=size)):
            return name
    return None


def quantization_config(
    spec: DecoderSpec,
    shapes: Mapping[str, tuple[int, ...]],
    schemes: Mapping[str, QuantScheme],
    *,
    with_g_idx: Collection[str] = (),
    kv_cache: ActivationScheme | None = None,
) -> dict[str, Any] | None:
    """The `quantization_config` of config.json; None when nothing is quantized.

    shapes: of every tensor of the source. schemes: of every quantized tensor, by tensor name.
    kv_cache: of the key/value cache whose scales are stored. "transposed" is ours: modules that
    the source stores as [K, N]. RecipeError for a cache without quantized weights
    and for a quantized embedding.
    """
    if not schemes:
        if kv_cache is None:
            return None
        raise RecipeError(
            f"kv_cache: {NAME} has no word for a quantized cache beside dense weights; use"
            " output.format 'compressed-tensors'"
        )
    if spec.embedding in schemes and spec.embedding != spec.head:
        raise RecipeError(
            f"{spec.embedding}: no loader of {NAME} takes a quantized embedding; use output.format"
            " 'compressed-tensors', or leave it out"
        )
    layers = {module_of(name): _layer(scheme) for name, scheme in schemes.items()}
    kinds = list({str(layer): layer for layer in layers.values()}.values())
    mixed = {"quant_algo": MIXED, "quantized_layers": layers}
    transposed = [x.name for x in spec.all_linears() if x.transposed and x.tensor in schemes]
    return {
        "quant_method": NAME,
        **(kinds[0] if len(kinds) == 1 else mixed),
        "ignore": ignored_modules(spec, shapes, schemes),
        **({"kv_cache_scheme": _cache_word(kv_cache)} if kv_cache is not None else {}),
        **({"transposed": transposed} if transposed else {}),
        "producer": _PRODUCER,
    }


def side_file(block: Mapping[str, Any]) -> dict[str, Any]:
    """Content of hf_quant_config.json, which says in other words what `quantization_config`'s block
    says."""
    cache = block.get("kv_cache_scheme")
    same = ("quant_algo", "group_size", "has_zero_point", "pre_quant_scale", "quantized_layers")
    quantization = {
        **{key: block[key] for key in same if key in block},
        "kv_cache_quant_algo": "FP8" if isinstance(cache, Mapping) else cache,
        "exclude_modules": block["ignore"],
    }
    return {"producer": block["producer"], "quantization": quantization}


def _layer(scheme: QuantScheme) -> dict[str, Any]:
    found = algorithm(scheme)
    assert found is not None, f"{scheme.describe()} should have been refused"
    if found == _AWQ:
        words = {"has_zero_point": False, "pre_quant_scale": False}
        return {"quant_algo": found, "group_size": scheme.group_size, **words}
    return {"quant_algo": found, **({"group_size": scheme.group_size} if scheme.is_fp4 else {})}


def _cache_word(cache: ActivationScheme) -> Any:
    if cache == FP8_CACHE:
        return {"dynamic": False, "num_bits": 8, "type": "float"}
    if cache == INT8_CACHE:
        return "INT8"
    raise RecipeError(
        f"kv_cache: {cache.describe()} cannot be stored; 8 bits with one static scale a tensor can"
        " (fp8 or int8)"
    )


def read_schemes(config: Mapping[str, Any]) -> SchemeMap:
    """Schemes of a checkpoint whose config.json has ModelOpt's quantization_config, in the words of
    either file. A group size that it lacks is ModelOpt's default, 128 (Checkpoint.config has the
    one in hf_quant_config.json already).

    CheckpointError, naming the key, for what is malformed or no scheme of ours.
    """
    place, block = details(config)
    ignored = "ignore" if "ignore" in block else "exclude_modules"
    algo = _algorithm(f"{place}.quant_algo", block.get("quant_algo"), (*_READABLE, MIXED))
    if algo == MIXED:
        groups = _named(f"{place}.quantized_layers", block.get("quantized_layers"))
    else:
        groups = ((("Linear",), _scheme(place, block)),)
    return SchemeMap(
        groups,
        _patterns(values.names(f"{place}.{ignored}", block.get(ignored))),
        names_in(config, "transposed"),
        _cache(place, block),
    )


def details(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Place and content of what says how a checkpoint is quantized, in config.json."""
    found = find_block(config)
    if found is None:
        raise CheckpointError(
            "config.json has no quantization_config, but there are ModelOpt weights; it must be the"
            f" mapping written with them, or the content of {HF_QUANT_CONFIG}"
        )
    place, block = found
    if "quantization" not in block:
        return place, block
    return f"{place}.quantization", values.mapping(f"{place}.quantization", block["quantization"])


def _named(place: str, value: object) -> tuple[tuple[tuple[str, ...], QuantScheme], ...]:
    """Modules by scheme, of a checkpoint that names every one."""
    members: dict[QuantScheme, list[str]] = {}
    for name, layer in values.mapping(place, value).items():
        if name.startswith("re:"):
            raise CheckpointError(f"{place} has {values.shown(name)}; it must name modules")
        scheme = _scheme(f"{place}.{name}", values.mapping(f"{place}.{name}", layer))
        members.setdefault(scheme, []).append(name)
    return tuple((tuple(names), scheme) for scheme, names in members.items())


def _scheme(place: str, block: Mapping[str, Any]) -> QuantScheme:
    algo = _algorithm(f"{place}.quant_algo", block.get("quant_algo"), tuple(_READABLE))
    known = _READABLE[algo]
    values.require(f"{place}.has_zero_point", block.get("has_zero_point", False), (False,))
    size = block.get("group_size")
    if size is None or algo == _AWQ:
        size = known.group_size if size is None else values.whole(f"{place}.group_size", size)
        return values.made(place, lambda: replace(known, group_size=size))
    if known.granularity in ("group", "block"):
        values.require(f"{place}.group_size", size, (known.group_size,))
    return known


def _algorithm(place: str, value: object, known: tuple[str, ...]) -> str:
    """In capitals: ModelOpt itself writes some in small letters."""
    algo = value.upper() if isinstance(value, str) else value
    values.require(place, algo, known)
    return str(algo)


def _cache(place: str, block: Mapping[str, Any]) -> ActivationScheme | None:
    key = "kv_cache_scheme" if "kv_cache_scheme" in block else "kv_cache_quant_algo"
    value = block.get(key)
    if isinstance(value, Mapping):
        values.require(f"{place}.{key}.num_bits", value.get("num_bits"), (8,))
        values.require(f"{place}.{key}.type", value.get("type", "int"), ("float", "int"))
        return FP8_CACHE if value.get("type") == "float" else INT8_CACHE
    values.require(f"{place}.{key}", value, (None, *_CACHES))
    return None if value is None else _CACHES[str(value)]


def _patterns(ignored: tuple[str, ...]) -> tuple[str, ...]:
    """Whole names, then one pattern for the wildcards. ModelOpt has no word for other patterns, so
    that "re:" is part of a name."""
    wild = [name for name in ignored if name.startswith("re:") or any(x in name for x in "*?[")]
    plain = tuple(name for name in ignored if name not in wild)
    return (*plain, "re:" + "|".join(fnmatch.translate(name) for name in wild)) if wild else plain
