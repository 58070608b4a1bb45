"""What an export will write, decided and refused before the first byte."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from compress.checkpoint import Checkpoint, ShardLayout, TensorInfo, plan_shards
from compress.checkpoint.shards.dtypes import DTYPE_CODES
from compress.checkpoint.shards.layout import Entry, nbytes
from compress.checkpoint.ties import said, settled
from compress.convert.checks import check
from compress.convert.scales import DTYPE_WORDS, ScaleChange
from compress.convert.source import ExportLayer, Held, look
from compress.errors import CheckpointError, RecipeError
from compress.formats import CODECS, CodedWeights, Format, open_coded
from compress.formats.kv_cache import is_cache_tensor
from compress.formats.storage import WeightStorage
from compress.plan.unlisted import opened
from compress.quant.scheme import QuantScheme
from compress.report.units import counted
from compress_exporters.table import EXPORTERS

# What else a format is called; capitals, "-" and "_" make no difference.
_ALIASES: Mapping[str, str] = MappingProxyType({"fp8-block": "fp8", "bnb": "bitsandbytes"})


@dataclass(frozen=True, slots=True, eq=False)
class ExportPlan:
    """held: the source, its layers with their sizes in the target. target: the format to write.

    original: what the tensors would be in a dense checkpoint, with the dtype of the scales for a
    quantized one. tensors: for each of those the entries it becomes. config: the target's
    quantization_config. notes: what a person should know about the numbers.
    """

    held: Held
    target: Format
    original: Mapping[str, TensorInfo]
    tensors: Mapping[str, tuple[Entry, ...]]
    shards: ShardLayout
    config: Mapping[str, Any] | None
    notes: tuple[str, ...]

    @property
    def source(self) -> CodedWeights:
        return self.held.weights

    @property
    def schemes(self) -> Mapping[str, QuantScheme]:
        """Of the tensors that are quantized in the result."""
        return {} if self.target.method is None else self.held.schemes


def plan_export(
    checkpoint: Checkpoint, to: str, *, round_scales: bool, shard_bytes: int
) -> ExportPlan:
    """The plan of a conversion to the format `to` (a key of CODECS). RecipeError for what it
    cannot hold, CheckpointError for a source at fault. Reads headers, scales and what is small, and
    head and embedding where config.json calls them one and both are stored."""
    source, target = _open(checkpoint, to)
    held = look(source)
    if target.method is not None:
        packed = [layer.linear for layer in held.layers.values()]
        source = replace(source, spec=opened(checkpoint.config, source.spec, packed, target.name))
        held = replace(held, weights=source)
    scales = check(held, target, round_scales=round_scales)
    if target.method is None:
        held = replace(held, kv_cache=None)
    original = _original(held, target)
    tensors = {name: tuple(_entries(held, target, original[name])) for name in original}
    cache = []
    if held.kv_cache is not None and target.cache is not None:
        cache = target.cache.layout(source.spec, held.kv_dtype)
    entries = [entry for found in tensors.values() for entry in found]
    layers = {name: _sized(layer, tensors[name]) for name, layer in held.layers.items()}
    return ExportPlan(
        held=replace(held, layers=layers),
        target=target,
        original=original,
        tensors=tensors,
        shards=plan_shards([*entries, *cache], shard_bytes),
        config=target.config(
            source.spec,
            held.shapes,
            {} if target.method is None else held.schemes,
            with_g_idx=held.with_g_idx,
            kv_cache=held.kv_cache,
        ),
        notes=(*_tie_note(checkpoint, source), *_notes(held, target, scales)),
    )


def format_name(to: str) -> str:
    """The key of CODECS that is meant; RecipeError, with the nearest format or artifact, where
    there is none."""
    plain = to.strip().lower().replace("_", "-")
    names = {**{name.replace("_", "-"): name for name in CODECS}, **_ALIASES}
    if plain in names:
        return names[plain]
    known = names | {name: name for name in EXPORTERS}
    close = difflib.get_close_matches(plain, known, n=1)
    hint = f"; did you mean {known[close[0]]!r}?" if close else ""
    raise RecipeError(f"--to is {to!r}; it is one of {', '.join((*CODECS, *EXPORTERS))}{hint}")


def _open(checkpoint: Checkpoint, to: str) -> tuple[CodedWeights, Format]:
    weights = open_coded(checkpoint)
    if weights is None:
        raise CheckpointError(
            f"{checkpoint.path} is not quantized, so there is nothing to convert; use"
            " `compress-model run` with a recipe"
        )
    if weights.format.name == to:
        raise RecipeError(f"{checkpoint.path} is in the format {to} already; copy the folder")
    return weights.with_checkpoint(settled(checkpoint, weights.spec)), CODECS[to]


def _original(held: Held, target: Format) -> dict[str, TensorInfo]:
    """Tensors of the dense original; the dtype of a quantized one is that of its scales in the
    target, or of the weights where the target is dense."""
    weights = held.weights
    plain = DTYPE_CODES[weights.plain_dtype]
    found = {}
    for name, shape in held.shapes.items():
        if name not in held.layers and name not in held.others:
            found[name] = weights.checkpoint.tensors[name]
            continue
        kept = target.scale_dtype or _scale_dtype(weights, name)
        found[name] = TensorInfo(name, plain if target.method is None else kept, shape, "", 0, 0)
    return found


def _scale_dtype(source: CodedWeights, tensor: str) -> str:
    """Code of a weight's scales; NVFP4's are the same everywhere and say nothing."""
    module, tensors = tensor.removesuffix(".weight"), source.checkpoint.tensors
    parts = (f"{module}.{part}" for part in source.reader.scales)
    dtype = next(tensors[name].dtype for name in parts if name in tensors)
    if dtype == "F8_E8M0":
        return "F32"  # as they are read
    return DTYPE_CODES[source.plain_dtype] if dtype == "F8_E4M3" else dtype


def _entries(held: Held, target: Format, info: TensorInfo) -> list[Entry]:
    layer = held.layers.get(info.name)
    if layer is None:
        return [(info.name, info.dtype, info.shape)]
    how = WeightStorage.of_linear(layer.linear, layer.scheme, info.dtype, act_order=layer.reordered)
    return target.layout(how)


def _sized(layer: ExportLayer, entries: tuple[Entry, ...]) -> ExportLayer:
    return replace(layer, bytes_after=sum(nbytes(entry) for entry in entries))


def _tie_note(checkpoint: Checkpoint, source: CodedWeights) -> Iterator[str]:
    tied = said(source.checkpoint.config)
    if tied != said(checkpoint.config):
        yield f"config.json now says tie_word_embeddings {str(tied).lower()}, as the tensors do"


def _notes(held: Held, target: Format, scales: ScaleChange) -> Iterator[str]:
    """What a person should know about what becomes of the numbers."""
    schemes = held.schemes.values()
    if (changed := scales.describe()) is not None:
        yield changed
    if target.method is None:
        yield from _dense_notes(held)
    elif any(scheme.is_fp4 for scheme in schemes):
        yield (
            "NVFP4's global scales became their reciprocals in fp32, which changes a weight by"
            " about 1e-7 of its value"
        )
    if held.centred:
        layers = counted(held.centred, "layer")
        yield f"all zero points are 0: {layers} without a mark for it taken as symmetric"
    reader = target.reader
    unmarked = sum(reader.as_read(scheme) != scheme for scheme in schemes) if reader else 0
    if unmarked:
        yield (
            f"{target.name} has no mark for symmetric weights: {counted(unmarked, 'layer')} have"
            " zero points of 0 (8 in the file) and read back as asymmetric, with the same values"
        )
    unsaid = [name for name in held.weights.checkpoint.tensors if is_cache_tensor(name)]
    if unsaid and held.weights.kv_cache is None:
        yield (
            f"{counted(len(unsaid), 'scale')} of a key/value cache left out ({unsaid[0]}), as the"
            " source's quantization_config has none"
        )


def _dense_notes(held: Held) -> Iterator[str]:
    dtype = DTYPE_WORDS[DTYPE_CODES[held.weights.plain_dtype]]
    yield f"each weight is (code - zero) * scale, rounded once to {dtype}"
    if any(scheme.activation for scheme in held.schemes.values()):
        yield "inputs are not quantized in a dense checkpoint"
    if held.weights.kv_cache is not None:
        yield "keys and values are not quantized in a dense checkpoint: their scales are left out"
    if held.weights.side is not None:
        yield "outlier columns are in the weights with their 16-bit values"
