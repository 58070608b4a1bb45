"""A checkpoint as a report has it: what went in, and what is there."""

from collections.abc import Sequence
from math import prod

from compress.arch.cache_size import CacheSize
from compress.arch.spec import DecoderSpec, LinearSpec
from compress.checkpoint import Checkpoint
from compress.formats import Weights
from compress.formats.gguf_weights import GgufWeights
from compress.plan.cache_scales import cache_of
from compress.report.schema import Result, Source
from compress.report.units import counted


def source_of(checkpoint: Checkpoint, spec: DecoderSpec, sha256: str, cache: CacheSize) -> Source:
    """What went in. cache: of its keys and values."""
    return Source(
        path=checkpoint.told,
        sha256=sha256,
        params=checkpoint.params,
        bytes=checkpoint.file_bytes,
        dtype=checkpoint.main_dtype,
        kv_bytes_per_token=cache.token or None,
        context=cache.tokens or None,
        kv_bytes_of_context=cache.context,
        architecture=architecture_of(spec),
    )


def architecture_of(spec: DecoderSpec) -> str:
    """What kind of model and its sizes, for people."""
    head = "tied" if spec.tied else "untied"
    heads = f" {heads_of(spec)}," if spec.heads else ""
    wide = f" ffn {spec.intermediate}," if spec.intermediate else ""
    return (
        f"{spec.model_type}, {counted(len(spec.blocks), 'block')}, hidden {spec.hidden},"
        f"{heads}{wide} vocabulary {spec.vocab}, {head} head"
    )


def heads_of(spec: DecoderSpec) -> str:
    """Query heads, and what keys and values are made of: "8 heads (2 KV)" or "8 heads,
    latent 96 + 32"."""
    latent = spec.blocks[0].sizes.latent if spec.blocks else None
    made = f" ({spec.kv_heads} KV)"
    if latent is not None:
        made = f", latent {latent.rank} + {latent.rotated}"
    return f"{counted(spec.heads, 'head')}{made}"


def result_of(weights: Weights) -> Result:
    """A checkpoint as a report has it."""
    checkpoint, spec, cache = weights.checkpoint, weights.spec, cache_of(weights)
    linears = _counted(weights)
    numbers = sum(n * k for n, k in (x.shape for x in linears))
    return Result(
        path=checkpoint.told,
        params=sum(prod(shape) for shape in weights.shapes.values()),
        bytes=sum(part.file_bytes for part in weights.checkpoints),
        bits_per_weight=8 * _stored(weights, linears) / numbers,
        kv_bytes_per_token=cache.token,
        context=cache.tokens or None,
        kv_bytes_of_context=cache.context,
        format=weights.format.method or weights.format.name,
        architecture=architecture_of(spec),
    )


def _counted(weights: Weights) -> list[LinearSpec]:
    """The quantized linears where there are any, as the report of a run counts them; of a GGUF
    file, which has most tensors in blocks, those of the decoder's blocks."""
    spec = weights.spec
    if weights.checkpoint.gguf is not None:
        return list(spec.linears())
    return [x for x in spec.all_linears() if weights.is_quantized(x.name)] or list(spec.linears())


def _stored(weights: Weights, linears: Sequence[LinearSpec]) -> int:
    """Bytes of the weights of linears, with all that they are decoded by."""
    if isinstance(weights, GgufWeights):
        return sum(weights.nbytes(linear.tensor) for linear in linears)
    names = {linear.name for linear in linears}
    return sum(
        info.nbytes
        for part in weights.checkpoints
        for name, info in part.tensors.items()
        if name.rpartition(".")[0] in names and not name.endswith(".bias")
    )
