"""What a checkpoint holds, dense or compressed, for `compress-model inspect`.

A dense one is told without torch, which takes longer to import than the headers to read.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.arch.cache_size import CacheSize, cache_size
from compress.arch.describe import describe
from compress.arch.sizes import BlockSizes
from compress.arch.spec import DecoderSpec
from compress.checkpoint import Checkpoint, resolve_model
from compress.checkpoint.detect import detect
from compress.checkpoint.shards.dtype_codes import itemsize
from compress.checkpoint.ties import contradiction
from compress.errors import CheckpointError

if TYPE_CHECKING:
    from compress.formats import Weights

UNKNOWN_SCHEME = "no config group"  # of codes that the config says nothing of


def inspect_checkpoint(path: str | Path, verify: bool = False) -> dict[str, Any]:
    """Facts about a checkpoint as plain data.

    "decoder" is the reason, a text, where the decoder cannot be described; there are no "layers"
    then. verify: also read every tensor and list those with NaN or infinity under "damaged". Raises
    CheckpointError when the folder's structure is broken.
    """
    checkpoint = Checkpoint.open(resolve_model(path))
    method = detect(checkpoint.config, checkpoint.tensors)
    parts = (checkpoint, *_side(checkpoint, method))
    facts: dict[str, Any] = {
        "path": str(checkpoint.named.resolve()),
        "model_type": checkpoint.config.get("model_type"),
        "quantization": method,
        "tensors": sum(len(part.tensors) for part in parts),
        "bytes": sum(part.file_bytes for part in parts),
        "files": [file for part in parts for file in part.files],
        "dtypes": dict(Counter(info.dtype for p in parts for info in p.tensors.values())),
        "side_files": [p.name for p in checkpoint.side_files()],
        "skipped_files": list(checkpoint.skipped_files),
    }
    try:
        facts |= _told(checkpoint, method, parts)
    except CheckpointError as error:
        facts["decoder"] = str(error)
    if verify:
        facts["damaged"] = dict(_damaged(parts))
    return facts


def _told(
    checkpoint: Checkpoint, method: str | None, parts: Iterable[Checkpoint]
) -> dict[str, Any]:
    """What is told of the decoder."""
    if checkpoint.gguf is not None:
        return _in_gguf(checkpoint)
    return _described(checkpoint) if method is None else _decoded(checkpoint, parts)


def _damaged(parts: Iterable[Checkpoint]) -> Iterator[tuple[str, str]]:
    """Tensors with values that are not finite, with how many; every value is read."""
    from compress.checkpoint import scan
    from compress.formats.gguf_weights import scan_gguf

    for part in parts:
        for name, found in scan(part) if part.gguf is None else scan_gguf(part):
            if found is not None:
                yield name, found.describe()


def _side(checkpoint: Checkpoint, method: str | None) -> Iterator[Checkpoint]:
    """The file of outlier columns beside the weights, where there is one."""
    if method is not None:
        from compress.formats.bitsandbytes.config_read import open_side

        side = open_side(checkpoint)
        yield from () if side is None else (side,)


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    """What is told of a dense checkpoint."""
    spec = describe(checkpoint.config, checkpoint.shapes)
    odd = contradiction(checkpoint.config, spec)
    width = itemsize(checkpoint.tensors[spec.embedding].dtype)
    return {
        "decoder": _decoder(spec),
        **_cache(cache_size(checkpoint.config, spec, width)),
        "layers": _layers(spec, [checkpoint], {}),
        "oddities": [] if odd is None else [odd],
    }


def _decoded(checkpoint: Checkpoint, parts: Iterable[Checkpoint]) -> dict[str, Any]:
    """What is told of a quantized one."""
    from compress.formats import open_coded
    from compress.formats.oddities import oddities
    from compress.plan.cache_scales import cache_of

    weights = open_coded(checkpoint)
    assert weights is not None, "a format was detected"
    layers = _layers(weights.spec, parts, dict(_stored(weights)))
    facts = {
        "decoder": _decoder(weights.spec),
        "kv_cache": None if weights.kv_cache is None else weights.kv_cache.describe(),
        **_cache(cache_of(weights)),
        "layers": layers,
        "schemes": dict(Counter(layer["stored"] for layer in layers)),
        "oddities": oddities(weights),
    }
    if weights.side is not None:
        counts = {x["name"]: weights.outlier_columns(x["name"]) for x in layers}
        facts["outlier_columns"] = {name: n for name, n in counts.items() if n is not None}
    return facts


def _in_gguf(checkpoint: Checkpoint) -> dict[str, Any]:
    """What is told of a GGUF file."""
    from compress.formats.gguf_weights import GgufWeights, types_of
    from compress.plan.cache_scales import cache_of

    weights = GgufWeights.of(checkpoint)
    layers = [
        {
            "name": x.name,
            "role": x.role,
            "shape": list(x.shape),
            "stored": str(weights.stored_in(x.tensor)),
            "bytes": weights.nbytes(x.tensor),
        }
        for x in weights.spec.all_linears()
    ]
    linears = list(weights.spec.linears())
    nbytes = sum(weights.nbytes(x.tensor) for x in linears)
    return {
        "decoder": _decoder(weights.spec),
        **_cache(cache_of(weights)),
        "types": types_of(checkpoint),
        "bits_per_weight": 8 * nbytes / sum(x.shape[0] * x.shape[1] for x in linears),
        "layers": layers,
        "oddities": [],
    }


def _cache(cache: CacheSize) -> dict[str, Any]:
    return {"kv_bytes_per_token": cache.token, "kv_bytes_of_context": cache.context}


def _decoder(spec: DecoderSpec) -> dict[str, Any]:
    return {
        "family": spec.family,
        "blocks": len(spec.blocks),
        "hidden": spec.hidden,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        **_latent(spec),
        "intermediate": spec.intermediate,
        "vocab": spec.vocab,
        "context": spec.context,
        "experts": spec.experts,
        "tied": spec.tied,
        "copied": list(spec.copied),
        "unrecognised": [name for block in spec.blocks for name in block.unrecognised],
        **_differing(spec),
    }


def _latent(spec: DecoderSpec) -> dict[str, Any]:
    """What keys and values are made of, where that is no heads of their own."""
    latent = spec.blocks[0].sizes.latent if spec.blocks else None
    return {} if latent is None else {"latent": {"rank": latent.rank, "rotated": latent.rotated}}


def _differing(spec: DecoderSpec) -> dict[str, Any]:
    """Sizes that are not those of all blocks, block by block; those above are the largest."""
    listed = {
        field.name: [getattr(block.sizes, field.name) for block in spec.blocks]
        for field in fields(BlockSizes)
        # Without experts their width is that of the MLP.
        if field.name != "dense" and (field.name != "expert" or spec.experts)
    }
    found = {name: sizes for name, sizes in listed.items() if len(set(sizes)) > 1}
    return {"by_block": found} if found else {}


def _layers(
    spec: DecoderSpec, parts: Iterable[Checkpoint], stored: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Every linear and the embedding, with what it is stored as and the bytes of that.

    stored: schemes of the quantized ones, by name; the others go by the dtype of their tensor.
    """
    tensors = {name: info for part in parts for name, info in part.tensors.items()}
    sizes: Counter[str] = Counter()
    for name, info in tensors.items():
        module, _, part = name.rpartition(".")
        sizes[module] += 0 if part == "bias" else info.nbytes
    return [
        {
            "name": x.name,
            "role": x.role,
            "shape": list(x.shape),
            "stored": stored[x.name] if x.name in stored else tensors[x.tensor].dtype.lower(),
            "bytes": sizes[x.tensor.rpartition(".")[0]],
        }
        for x in spec.all_linears()
    ]


def _stored(weights: "Weights") -> Iterator[tuple[str, str]]:
    """Name and scheme of every quantized linear."""
    for linear in weights.spec.all_linears():
        scheme = weights.scheme(linear.name)
        if scheme is not None:
            yield linear.name, scheme.describe()
        elif weights.is_quantized(linear.name):
            yield linear.name, UNKNOWN_SCHEME
