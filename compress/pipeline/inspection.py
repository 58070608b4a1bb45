"""What a checkpoint holds, dense or compressed, for `compress-model inspect`."""

from collections import Counter
from pathlib import Path
from typing import Any

from compress.arch.describe import describe
from compress.arch.spec import DecoderSpec
from compress.checkpoint import Checkpoint, resolve_model, scan
from compress.checkpoint.detect import detect
from compress.errors import CheckpointError
from compress.formats import CodedWeights, Weights, open_weights
from compress.formats.bitsandbytes_read import open_side
from compress.formats.oddities import oddities
from compress.report.units import size


def inspect_checkpoint(path: str | Path, verify: bool = False) -> dict[str, Any]:
    """Facts about a checkpoint as plain data.

    verify: also read every tensor and list those with NaN or infinity under "damaged". Raises
    CheckpointError when the folder's structure is broken.
    """
    checkpoint = Checkpoint.open(resolve_model(path))
    method = detect(checkpoint.config, checkpoint.tensors)
    side = open_side(checkpoint)
    parts = (checkpoint,) if side is None else (checkpoint, side)
    facts: dict[str, Any] = {
        "path": str(checkpoint.path.resolve()),
        "model_type": checkpoint.config.get("model_type"),
        "quantization": method,
        "tensors": sum(len(part.tensors) for part in parts),
        "bytes": sum(part.file_bytes for part in parts),
        "files": [file for part in parts for file in part.files],
        "dtypes": dict(Counter(info.dtype for p in parts for info in p.tensors.values())),
        "side_files": [p.name for p in checkpoint.side_files()],
        "skipped_files": list(checkpoint.skipped_files),
    }
    spec, reason = _spec(checkpoint, method)
    facts["decoder"] = reason if spec is None else _decoder(spec)
    if spec is not None and method is not None:
        weights = open_weights(checkpoint, spec)
        facts["schemes"] = _schemes(weights)
        assert isinstance(weights, CodedWeights)
        facts["oddities"] = oddities(weights)
        if (fixed := _outlier_columns(weights)) is not None:
            facts["outlier_columns"] = fixed
    if verify:
        scans = [found for part in parts for found in scan(part)]
        facts["damaged"] = {name: found.describe() for name, found in scans if found is not None}
    return facts


def _spec(checkpoint: Checkpoint, method: str | None) -> tuple[DecoderSpec | None, str]:
    """The decoder, or why this version cannot describe it."""
    try:
        if method is None:
            return describe(checkpoint.config, checkpoint.shapes), ""
        return open_weights(checkpoint).spec, ""
    except CheckpointError as error:
        return None, str(error)


def _decoder(spec: DecoderSpec) -> dict[str, Any]:
    linears = Counter(f"{x.role} {x.shape[0]} x {x.shape[1]}" for x in spec.all_linears())
    return {
        "family": spec.family,
        "blocks": len(spec.blocks),
        "hidden": spec.hidden,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate": spec.intermediate,
        "vocab": spec.vocab,
        "context": spec.context,
        "experts": spec.experts,
        "tied": spec.tied,
        "copied": list(spec.copied),
        "unrecognised": [name for block in spec.blocks for name in block.unrecognised],
        "linears": dict(linears),
    }


def _schemes(weights: Weights) -> dict[str, int]:
    """How many linears are stored in which scheme."""
    assert isinstance(weights, CodedWeights)
    found: Counter[str] = Counter()
    for linear in weights.spec.all_linears():
        scheme = weights.scheme(linear.name)
        if scheme is not None:
            found[scheme.describe()] += 1
        elif weights.is_quantized(linear.name):
            found["no config group"] += 1
        else:
            found[weights.checkpoint.tensors[linear.tensor].dtype.lower()] += 1
    return dict(found)


def _outlier_columns(weights: Weights) -> dict[str, int] | None:
    """Input columns kept in 16 bit of every linear where calibration fixed them; None where it
    did nowhere."""
    if not isinstance(weights, CodedWeights) or weights.side is None:
        return None
    counts = {x.name: weights.outlier_columns(x.name) for x in weights.spec.all_linears()}
    return {name: count for name, count in counts.items() if count is not None}


def inspect_table(facts: dict[str, Any]) -> str:
    """The facts for a person."""
    files = len(facts["files"])
    lines = [
        f"{facts['path']}",
        f"  model type    {facts['model_type']}",
        f"  quantization  {facts['quantization'] or 'none'}",
        f"  weights       {size(facts['bytes'])} in {facts['tensors']} tensors, {files} file(s)",
        f"  dtypes        {_counts(facts['dtypes'])}",
        *_decoder_lines(facts["decoder"]),
    ]
    if "schemes" in facts:
        lines.append(f"  stored as     {_counts(facts['schemes'])}")
    if "outlier_columns" in facts:
        lines += _outlier_lines(facts["outlier_columns"])
    lines += [f"  odd           {line}" for line in facts.get("oddities", [])]
    if facts["skipped_files"]:
        names = ", ".join(name.partition(" (")[0] for name in facts["skipped_files"])
        lines.append(f"  beside it     {names} (a run does not carry these over)")
    if "damaged" in facts:
        lines += [f"  damaged       {name}: {what}" for name, what in facts["damaged"].items()]
        lines += [] if facts["damaged"] else ["  values        all finite"]
    return "\n".join(lines)


def _decoder_lines(decoder: dict[str, Any] | str) -> list[str]:
    if isinstance(decoder, str):
        return [f"  decoder       not described: {decoder}"]
    sizes = (
        f"{decoder['blocks']} blocks, hidden {decoder['hidden']}, {decoder['heads']} heads"
        f" ({decoder['kv_heads']} KV) of {decoder['head_dim']}, ffn {decoder['intermediate']},"
        f" vocabulary {decoder['vocab']}, context {decoder['context']}"
    )
    head = "tied" if decoder["tied"] else "untied"
    return [
        f"  decoder       {decoder['family']}: {sizes}, {head} head",
        f"  linears       {_counts(decoder['linears'])}",
        *(f"  copied        {name}" for name in decoder["copied"]),
        *(f"  unrecognised  {name}" for name in decoder["unrecognised"]),
    ]


def _outlier_lines(columns: dict[str, int]) -> list[str]:
    """A line for the layers of each parent module that have as many: q_proj, k_proj, v_proj 6."""
    lines: dict[str, dict[int, list[str]]] = {}
    for name, count in columns.items():
        parent, _, leaf = name.rpartition(".")
        lines.setdefault(parent, {}).setdefault(count, []).append(leaf)
    shown = [
        f"{parent}: " + ", ".join(f"{count} in {' '.join(x)}" for count, x in counts.items())
        for parent, counts in lines.items()
    ]
    return [f"  outliers      {line}" for line in shown]


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{n} x {name}" for name, n in found.items())
