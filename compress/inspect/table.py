"""The facts about a checkpoint as `compress-model inspect` prints them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from compress.report.columns import aligned
from compress.report.units import counted, size, trimmed


def inspect_table(facts: dict[str, Any], *, modules: bool = False) -> str:
    """The facts for a person: layers that are stored alike are one row.

    modules: every layer is a row of its own.
    """
    files, tensors = counted(len(facts["files"]), "file"), counted(facts["tensors"], "tensor")
    lines = [
        f"{facts['path']}",
        f"  model type    {facts['model_type']}",
        f"  quantization  {facts['quantization'] or 'none'}",
        f"  weights       {size(facts['bytes'])} in {tensors}, {files}",
        *_type_lines(facts),
        *_decoder_lines(facts["decoder"]),
    ]
    if "kv_bytes_per_token" in facts:
        stored = f", stored as {facts['kv_cache']}" if facts.get("kv_cache") else ""
        lines.append(f"  KV cache      {size(facts['kv_bytes_per_token'])} a token{stored}")
        lines += _whole_context(facts)
    if "schemes" in facts:
        lines.append(f"  stored as     {_counts(facts['schemes'])}")
    if "outlier_columns" in facts and not modules:
        lines += _outlier_lines(facts["outlier_columns"])
    lines += [f"  odd           {line}" for line in facts.get("oddities", [])]
    if facts["skipped_files"]:
        names = ", ".join(name.partition(" (")[0] for name in facts["skipped_files"])
        lines.append(f"  beside it     {names} (a run does not carry these over)")
    if "damaged" in facts:
        lines += [f"  damaged       {name}: {what}" for name, what in facts["damaged"].items()]
        lines += [] if facts["damaged"] else ["  values        all finite"]
    return "\n".join([*lines, *_layer_lines(facts, modules)])


def _type_lines(facts: dict[str, Any]) -> Iterator[str]:
    """What tensors are stored in; of a GGUF file with bytes and bits of a number."""
    if "types" not in facts:
        yield f"  dtypes        {_counts(facts['dtypes'])}"
        return
    for place, (kind, found) in enumerate(facts["types"].items()):
        told = f"{counted(found['tensors'], 'tensor')} in {kind}, {size(found['bytes'])}"
        bits = trimmed(8 * found["bytes"] / found["numbers"])
        yield f"  {'types' if place == 0 else '':12}  {told}, {bits} bits a number"
    yield f"  bits          {trimmed(facts['bits_per_weight'])} a weight of the blocks' linears"


def _whole_context(facts: dict[str, Any]) -> list[str]:
    """Where windows have a text take less than its tokens by themselves."""
    tokens, taken = facts["decoder"]["context"], facts["kv_bytes_of_context"]
    if taken is None or taken == tokens * facts["kv_bytes_per_token"]:
        return []
    return [f"                {size(taken)} a context of {tokens}: some layers have windows"]


def _layer_lines(facts: dict[str, Any], modules: bool) -> Iterator[str]:
    if "layers" not in facts:
        return
    yield ""
    if modules:
        yield from aligned(list(_module_rows(facts)), None)  # one line a layer, to be searched
    else:
        yield from aligned(_role_rows(facts["layers"]))
        yield ""
        yield "layer by layer: compress-model inspect with --modules"


def _role_rows(layers: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """role, shape, how many, what they are stored as, and their bytes together."""
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for layer in layers:
        key = (layer["role"], _shape(layer), layer["stored"])
        counts[key] += 1
        sizes[key] += layer["bytes"]
    rows = [
        (role, shape, str(count), stored, size(sizes[role, shape, stored]))
        for (role, shape, stored), count in counts.items()
    ]
    return [("layer", "shape", "count", "stored as", "size"), *rows]


def _module_rows(facts: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """name, shape, what it is stored as, bytes; outlier columns where calibration fixed some."""
    columns = facts.get("outlier_columns")
    more = () if columns is None else ("outlier columns",)
    yield ("layer", "shape", "stored as", "bytes", *more)
    for x in facts["layers"]:
        fixed = () if columns is None else (str(columns.get(x["name"], "")),)
        yield (x["name"], _shape(x), x["stored"], str(x["bytes"]), *fixed)


def _shape(layer: dict[str, Any]) -> str:
    rows, columns = layer["shape"]
    return f"{rows} x {columns}"


def _decoder_lines(decoder: dict[str, Any] | str) -> list[str]:
    if isinstance(decoder, str):
        return [
            f"  decoder       not described: {decoder}",
            "  layers        not listed, for want of the decoder; the rest is whole",
        ]
    blocks, heads = counted(decoder["blocks"], "block"), counted(decoder["heads"], "head")
    latent, own = decoder.get("latent"), f" ({decoder['kv_heads']} KV)"
    made = f", latent {latent['rank']} + {latent['rotated']}" if latent else ""
    sizes = (
        f"{blocks}, hidden {decoder['hidden']}, {heads}{'' if latent else own} of"
        f" {decoder['head_dim']}{made}, ffn {decoder['intermediate']}, vocabulary"
        f" {decoder['vocab']}, context {decoder['context']}"
    )
    tied = "tied" if decoder["tied"] else "untied"
    return [
        f"  decoder       {decoder['family']}: {sizes}, {tied} head",
        *(
            f"  by block      {name} {min(found)} to {max(found)}"
            for name, found in decoder.get("by_block", {}).items()
        ),
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
