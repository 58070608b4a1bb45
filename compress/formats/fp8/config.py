"""The quantization_config of block FP8 (`quant_method` "fp8"), written and read.

vLLM calls the modules that stay dense `ignored_layers` and takes their names, transformers calls
them `modules_to_not_convert` and takes a name, its beginning or its end up to a dot: we write both
and read either.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from compress.arch.spec import DecoderSpec
from compress.checkpoint.detect import find_block
from compress.errors import CheckpointError, RecipeError
from compress.formats import config_values as values
from compress.formats.compressed_tensors.config import ignored_modules
from compress.formats.compressed_tensors.config_read import SchemeMap
from compress.formats.conv1d import names_in
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme

NAME = "fp8"
IGNORED = ("ignored_layers", "modules_to_not_convert")
_WILDCARDS = 4  # more in one name take forever to match


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
    "transposed" is ours: modules that the source stores as [K, N]. RecipeError for more than one
    scheme and for scales of a cache.
    """
    if kv_cache is not None:
        raise RecipeError(
            f"kv_cache: {NAME} has no word for the scales of the key/value cache; use"
            " output.format 'compressed-tensors'"
        )
    if not schemes:
        return None
    scheme = _only(schemes.values())
    act = scheme.activation
    ignored = ignored_modules(spec, shapes, schemes)
    block = [scheme.group_size] * 2 if scheme.granularity == "block" else None
    transposed = [x.name for x in spec.all_linears() if x.transposed and x.tensor in schemes]
    return {
        "quant_method": NAME,
        "fmt": "e4m3",
        "activation_scheme": "static" if act is not None and not act.dynamic else "dynamic",
        # Written when null too: transformers takes its absence for blocks of 128.
        "weight_block_size": block,
        **dict.fromkeys(IGNORED, ignored),
        **({"transposed": transposed} if transposed else {}),
    }


def _only(schemes: Iterable[QuantScheme]) -> QuantScheme:
    found = list(dict.fromkeys(schemes))
    if len(found) > 1:
        shown = " and ".join(sorted(scheme.describe() for scheme in found))
        raise RecipeError(
            f"format {NAME!r} has one scheme for all layers, there are {shown}; use"
            " compressed-tensors"
        )
    return found[0]


def read_schemes(config: Mapping[str, Any]) -> SchemeMap:
    """Schemes of a checkpoint whose config.json has an "fp8" quantization_config.

    CheckpointError, naming the key, for what is malformed or no scheme of ours. Scales that are
    powers of two (`scale_fmt` "ue8m0") are read; that those of the inputs are rounded up to powers
    of two as well is left out of the scheme.
    """
    found = find_block(config)
    if found is None:
        raise CheckpointError(
            "config.json has no quantization_config, but there are fp8 weights; it must be the"
            " mapping written with them"
        )
    place, block = found
    values.require(f"{place}.fmt", block.get("fmt"), (None, "e4m3"))
    values.require(f"{place}.scale_fmt", block.get("scale_fmt"), (None, "float", "ue8m0"))
    values.require(f"{place}.expert_dtype", block.get("expert_dtype"), (None, "fp8"))
    inputs = block.get("activation_scheme")
    values.require(f"{place}.activation_scheme", inputs, ("dynamic", "static"))
    side = _side(f"{place}.weight_block_size", block.get("weight_block_size"))
    if side is None:
        static = PRESETS["FP8"].activation if inputs == "static" else ActivationScheme(type="float")
        scheme = QuantScheme(8, True, "tensor", 0, static, "float")
    else:
        # Static inputs have one scale a tensor, which no runtime takes beside blocks.
        values.require(f"{place}.activation_scheme", inputs, ("dynamic",))
        groups = ActivationScheme(type="float", granularity="group", group_size=side)
        scheme = QuantScheme(8, True, "block", side, groups, "float")
    return SchemeMap(
        ((("Linear",), scheme),),
        _patterns([x for key in IGNORED for x in _ignored(f"{place}.{key}", block.get(key))]),
        names_in(config, "transposed"),
    )


def _side(place: str, value: object) -> int | None:
    """Side of square blocks from [128, 128]; None for one scale a tensor."""
    if value is None:
        return None
    sides = value if isinstance(value, list) else []
    square = len(sides) == 2 and sides[0] == sides[1]
    if not square or isinstance(sides[0], bool) or not isinstance(sides[0], int) or sides[0] < 1:
        raise CheckpointError(
            f"{place} is {values.shown(value)}; this version reads square blocks such as [128, 128]"
        )
    return sides[0]


def _ignored(place: str, value: object) -> tuple[str, ...]:
    names = values.names_or_patterns(place, value)
    for name in names:
        if name.count("*") > _WILDCARDS or not name:
            raise CheckpointError(
                f"{place}: {values.shown(name)} is no module name with {_WILDCARDS} * at most"
            )
    return names


def _patterns(names: list[str]) -> tuple[str, ...]:
    """Whole names, then one pattern for names that begin or end with them and for wildcards."""
    if not names:
        return ()
    ignored = list(dict.fromkeys(names))
    parts = "|".join(_wildcards(entry) for entry in ignored)
    return (*ignored, rf"re:(?:(?:.*\.)?(?:{parts})|(?:{parts})(?:\..*)?)$")


def _wildcards(entry: str) -> str:
    """A literal name; `*` and `.*` stand for anything."""
    return ".*".join(re.escape(part) for part in re.split(r"\.?\*", entry))
