"""What an export will write, decided and refused before the first byte."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from compress.arch.spec import LinearSpec
from compress.checkpoint import Checkpoint, ShardLayout, TensorInfo, plan_shards
from compress.checkpoint.dtypes import DTYPE_CODES
from compress.checkpoint.layout import Entry, nbytes
from compress.checkpoint.ties import said, settled
from compress.errors import CheckpointError, RecipeError
from compress.formats import FORMATS, CodedWeights, Format, open_weights
from compress.formats.kv_cache import is_cache_tensor
from compress.formats.scales import Change
from compress.formats.weights import logical_shapes
from compress.pipeline.export_checks import (
    ExportLayer,
    cache_of,
    check_scales,
    refuse_factor,
    refuse_unfit,
    refuse_unlike,
    refuse_zeros,
)
from compress.quant.scheme import ActivationScheme, QuantScheme

_ALIASES = {"fp8-block": "fp8", "gptq-v2": "gptq_v2"}


@dataclass(frozen=True, slots=True, eq=False)
class ExportPlan:
    """source: the checkpoint as it is read. target: the format to write.

    layers: the quantized linears, by original tensor name. original: what the tensors would be in a
    dense checkpoint, with the dtype of the scales for a quantized one. tensors: for each of those
    the entries it becomes. cache: names of the scales of the key/value cache with their blocks.
    config: the target's quantization_config. rounded: what happens to scales.
    """

    source: CodedWeights
    target: Format
    layers: Mapping[str, ExportLayer]
    original: Mapping[str, TensorInfo]
    tensors: Mapping[str, tuple[Entry, ...]]
    shards: ShardLayout
    config: Mapping[str, Any] | None
    kv_cache: ActivationScheme | None
    kv_dtype: str
    rounded: Change
    notes: tuple[str, ...]

    @property
    def schemes(self) -> dict[str, QuantScheme]:
        return {name: layer.scheme for name, layer in self.layers.items()}

    @property
    def with_g_idx(self) -> frozenset[str]:
        return frozenset(name for name, layer in self.layers.items() if layer.reordered)

    @property
    def is_dense(self) -> bool:
        return self.target.method is None


def plan_export(
    checkpoint: Checkpoint, to: str, *, round_scales: bool, shard_bytes: int
) -> ExportPlan:
    """The plan of a conversion to the format `to`; RecipeError or CheckpointError for what it
    cannot hold or for what is wrong with the source. Reads headers, scales, zero points and g_idx
    only, and head and embedding where config.json calls them one and both are stored."""
    to = _ALIASES.get(to, to)
    source, target = _open(checkpoint, to), FORMATS[to]
    original = _original(source, target)
    layers = _layers(source, target, original)
    _check_others(source, original, layers)
    refuse_unfit(layers, target)
    refuse_unlike(source, target, layers)
    refuse_zeros(layers, target)
    rounded = check_scales(source, target, layers, round_scales=round_scales)
    kv_cache, kv_dtype = cache_of(source, target)
    tensors = {name: tuple(_entries(layers, target, original[name])) for name in original}
    layers = {name: _sized(layer, tensors[name]) for name, layer in layers.items()}
    extra = []
    if kv_cache is not None and target.cache is not None:
        extra = target.cache[0](source.spec, kv_dtype)
    entries = [entry for found in tensors.values() for entry in found]
    shapes = {name: info.shape for name, info in original.items()}
    plan = ExportPlan(
        source=source,
        target=target,
        layers=layers,
        original=original,
        tensors=tensors,
        shards=plan_shards([*entries, *extra], shard_bytes),
        config=None,
        kv_cache=kv_cache,
        kv_dtype=kv_dtype,
        rounded=rounded,
        notes=(*_tie_note(checkpoint, source), *_notes(source, target, layers, rounded)),
    )
    schemes = {} if plan.is_dense else plan.schemes
    config = target.config(
        source.spec, shapes, schemes, with_g_idx=plan.with_g_idx, kv_cache=kv_cache
    )
    return replace(plan, config=config)


def _open(checkpoint: Checkpoint, to: str) -> CodedWeights:
    if to not in FORMATS:
        raise RecipeError(f"--to is {to!r}; it is one of {', '.join(FORMATS)}")
    weights = open_weights(checkpoint)
    if not isinstance(weights, CodedWeights):
        raise CheckpointError(
            f"{checkpoint.path} is not quantized, so there is nothing to convert; use"
            " `compress-model run` with a recipe"
        )
    if weights.format.name == to:
        raise RecipeError(f"{checkpoint.path} is in the format {to} already; copy the folder")
    return replace(weights, checkpoint=settled(checkpoint, weights.spec))


def _original(source: CodedWeights, target: Format) -> dict[str, TensorInfo]:
    """Tensors of the dense original; the dtype of a quantized one is that of its scales in the
    target, or of the weights where the target is dense."""
    linears = {linear.tensor for linear in source.spec.all_linears()}
    plain = DTYPE_CODES[source.plain_dtype]
    found = {}
    for name, shape in logical_shapes(source.checkpoint).items():
        module = name.removesuffix(".weight")
        if name == module or not source.is_quantized(module):
            found[name] = source.checkpoint.tensors[name]
            continue
        if target.method is not None and name not in linears:
            raise CheckpointError(
                f"{name} is quantized but is no linear of the decoder, and only those are"
                " converted; export to dense"
            )
        dtype = plain if target.method is None else target.scale_dtype or _scale_dtype(source, name)
        found[name] = TensorInfo(name, dtype, shape, "", 0, 0)
    return found


def _scale_dtype(source: CodedWeights, tensor: str) -> str:
    """Code of a weight's scales; NVFP4's are the same everywhere and say nothing."""
    info = _scale(source, tensor)
    if info.dtype == "F8_E8M0":
        return "F32"  # as they are read
    return DTYPE_CODES[source.plain_dtype] if info.dtype == "F8_E4M3" else info.dtype


def _scale(source: CodedWeights, tensor: str) -> TensorInfo:
    module, tensors = tensor.removesuffix(".weight"), source.checkpoint.tensors
    names = [f"{module}.{part}" for part in source.reader.scales]
    for name in names:
        if name in tensors:
            return tensors[name]
    raise CheckpointError(f"tensor {names[0]} is missing; the checkpoint is incomplete")


def _layers(
    source: CodedWeights, target: Format, original: Mapping[str, TensorInfo]
) -> dict[str, ExportLayer]:
    layers = {}
    for linear in source.spec.all_linears():
        if linear.tensor not in original or not source.is_quantized(linear.name):
            continue
        scheme = source.scheme(linear.name)
        if scheme is None:
            raise CheckpointError(
                f"{linear.name} has quantized tensors but quantization_config does not say how they"
                " are stored; the config and the tensors do not belong together"
            )
        if target.method is not None and linear.transposed != source.transposed(linear.name):
            raise CheckpointError(
                f"{linear.tensor} holds codes in the order [in, out], which no other format has;"
                " export to dense"
            )
        refuse_factor(source, target, linear)
        size = sum(
            source.checkpoint.tensors[name].nbytes
            for part in (*source.reader.parts, "weight")
            if (name := f"{linear.name}.{part}") in source.checkpoint.tensors
        )
        layers[linear.tensor] = _layer(source, target, linear, scheme, size)
    return layers


def _layer(
    source: CodedWeights, target: Format, linear: LinearSpec, scheme: QuantScheme, size: int
) -> ExportLayer:
    """size: bytes before. Reads zero points and g_idx, of one layer at a time."""
    rest = source.beside(linear.name)
    order = None if rest.g_idx is None else sha256(rest.g_idx.int().numpy().tobytes()).hexdigest()
    zeros = 0 if rest.zero is None else rest.zero.numel()
    lost = 0 if rest.zero is None else target.unstorable(rest.zero, scheme)
    return ExportLayer(linear, scheme, order, zeros, lost, size, 0)


def _check_others(
    source: CodedWeights, original: Mapping[str, TensorInfo], layers: Mapping[str, ExportLayer]
) -> None:
    """Quantized weights that are no linears of the decoder, which only dense takes."""
    for name in original:
        module = name.removesuffix(".weight")
        if name not in layers and name != module and source.is_quantized(module):
            source.beside(module)


def _entries(layers: Mapping[str, ExportLayer], target: Format, info: TensorInfo) -> list[Entry]:
    layer = layers.get(info.name)
    if layer is None:
        return [(info.name, info.dtype, info.shape)]
    return target.layout(
        info.name,
        layer.linear.shape,
        layer.scheme,
        info.dtype,
        act_order=layer.reordered,
        transposed=layer.linear.transposed,
    )


def _sized(layer: ExportLayer, entries: tuple[Entry, ...]) -> ExportLayer:
    return replace(layer, bytes_after=sum(nbytes(entry) for entry in entries))


def _tie_note(checkpoint: Checkpoint, source: CodedWeights) -> list[str]:
    tied = said(source.checkpoint.config)
    if tied == said(checkpoint.config):
        return []
    return [f"config.json now says tie_word_embeddings {str(tied).lower()}, as the tensors do"]


def _notes(
    source: CodedWeights, target: Format, layers: Mapping[str, ExportLayer], rounded: Change
) -> list[str]:
    notes = []
    if rounded.changed:
        notes.append(
            f"{rounded.changed} of {rounded.total} scales were rounded to {target.scale_dtype}; the"
            f" largest changed by {rounded.largest:.2g} of its value"
        )
    if target.method is None and any(x.scheme.activation for x in layers.values()):
        notes.append("inputs are not quantized in a dense checkpoint")
    if any(x.scheme.is_fp4 for x in layers.values()) and target.method is not None:
        notes.append(
            "NVFP4's global scales became their reciprocals in fp32, which changes a weight by"
            " about 1e-7 of its value"
        )
    unsaid = [name for name in source.checkpoint.tensors if is_cache_tensor(name)]
    if unsaid and source.kv_cache is None:
        notes.append(
            f"{len(unsaid)} scales of a key/value cache are left out ({unsaid[0]}), as the source's"
            " quantization_config has none"
        )
    if source.side is not None and target.method is None:
        notes.append("outlier columns are in the weights with their 16-bit values")
    return notes
