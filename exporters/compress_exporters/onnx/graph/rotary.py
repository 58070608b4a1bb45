"""Rotary embeddings: tables of cosine and sine made of the engine's own frequencies.

Where frequencies depend on the length of a text, its length is how many real tokens the mask has:
so a token's rotation is that of transformers for one text at a time.
"""

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch

from compress.arch.forward.kinds import Grouped
from compress.arch.forward.rope import Rope
from compress.errors import CheckpointError
from compress.runtime.decoder.rope import Rotation
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.dense import TORCH, as_ir


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """cos, sin: [rows, pairs], looked up by rows [B, S]; or [B, S, pairs] without rows."""

    cos: ir.Value
    sin: ir.Value
    rows: ir.Value | None
    pairs: int


def angles(build: Build, rope: Rope) -> Angles:
    """Of one of the decoder's rotations; layers that rotate alike share it."""
    number = build.how.ropes.index(rope)
    make = _computed if rope.kind == "dynamic" else _tables
    return build.once(f"rotation {number}", lambda: make(build, rope, f"rotary.{number}"))


def rotated(
    build: Build, at: str, layer: Grouped, q: ir.Value, k: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Queries and keys [B, S, heads of each * key width] as a layer rotates them, if it does."""
    if layer.rope is None:
        return q, k
    found = angles(build, layer.rope)
    whole = 2 * found.pairs == layer.key_width
    return (
        _rotate(build, at, q, layer.heads, found, whole=whole),
        _rotate(build, at, k, layer.kv_heads, found, whole=whole),
    )


def _rotate(
    build: Build, at: str, x: ir.Value, heads: int, found: Angles, *, whole: bool
) -> ir.Value:
    """whole: heads are rotated whole."""
    graph = build.graph
    wide = build.how.rotate_late and graph.dtype != ir.DataType.FLOAT
    x = graph.op(at, "Cast", x, to=int(ir.DataType.FLOAT)) if wide else x
    inputs = [x, found.cos, found.sin, *([] if found.rows is None else [found.rows])]
    part = 0 if whole else 2 * found.pairs
    out = graph.op(
        at, "RotaryEmbedding", *inputs, num_heads=heads, rotary_embedding_dim=part, interleaved=0
    )
    return graph.op(at, "Cast", out, to=int(graph.dtype)) if wide else out


def rotated_heads(build: Build, at: str, rope: Rope, x: ir.Value, *, interleaved: bool) -> ir.Value:
    """x: [B, heads, S, width], of each head all that the rotation is for.

    interleaved: it turns neighbours, and what was turned stays in its place: scores ask for no
    order of numbers.
    """
    found = angles(build, rope)
    inputs = [x, found.cos, found.sin, *([] if found.rows is None else [found.rows])]
    return build.graph.op(at, "RotaryEmbedding", *inputs, interleaved=int(interleaved))


def context(build: Build) -> int:
    """Positions that tables have: learned ones as many as there are rows."""
    learned = build.how.positions
    if learned is not None:
        rows = build.weights.checkpoint.tensors[learned.tensor].shape[0] - learned.offset
        return min(rows, build.options.max_context or rows)
    known = build.options.max_context or build.spec.context
    if not known:
        raise CheckpointError(
            f"{build.weights.checkpoint.path}: config.json has no max_position_embeddings, so the"
            " tables of positions have no length; give --max-context"
        )
    return known


def tables(rope: Rope, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, fp32 [rows, pairs]. longrope has rows of short texts first, then those of
    long ones, where there are any."""
    rotation = Rotation.of(rope, torch.device("cpu"))
    most = rope.length
    if most is None or positions <= most:
        places = torch.arange(positions)
        return rotation.angles(places, torch.ones_like(places))
    short, long = torch.arange(most), torch.arange(positions)
    lengths = [torch.ones_like(short), torch.full_like(long, most + 1)]
    return rotation.angles(torch.cat([short, long]), torch.cat(lengths))


def _tables(build: Build, rope: Rope, at: str) -> Angles:
    graph, positions = build.graph, context(build)
    dtype = ir.DataType.FLOAT if build.how.rotate_late else graph.dtype
    pairs = (rope.dim + 1) // 2
    most = rope.length
    longer = most is not None and positions > most
    shape = (positions + (most or 0 if longer else 0), pairs)

    def table(which: int, name: str) -> ir.Value:
        def read() -> ir.TensorProtocol:
            return as_ir(tables(rope, positions)[which].to(TORCH[dtype]))

        return graph.weight(f"{at}.{name}", dtype, shape, read)

    rows = build.input("position_ids")
    if most is not None and longer:
        rows = graph.op(at, "Add", rows, _shift(build, at, most))
    return Angles(table(0, "cos"), table(1, "sin"), rows, pairs)


def _length(build: Build, at: str) -> ir.Value:
    """Real tokens of each text, int64 [B, 1]."""
    given = build.input("attention_mask")
    return build.graph.op(at, "ReduceSum", given, build.graph.ints(1), keepdims=1)


def _shift(build: Build, at: str, most: int) -> ir.Value:
    """int64 [B, 1]: `most` for a text that is longer, else 0."""
    graph, number = build.graph, build.graph.constant(np.array(most, np.int64))
    longer = graph.op(at, "Greater", _length(build, at), number)
    return graph.op(at, "Mul", graph.op(at, "Cast", longer, to=int(ir.DataType.INT64)), number)


def _computed(build: Build, rope: Rope, at: str) -> Angles:
    """Dynamic: theta grows with the text, so cosine and sine come out of the graph."""
    graph, most = build.graph, rope.length
    assert most is not None
    factor, dim = rope.parameters["factor"], rope.dim

    def double(value: object) -> ir.Value:
        return graph.constant(np.array(value, np.float64))

    length = graph.op(at, "Max", _length(build, at), graph.ints(most))
    length = graph.op(at, "Cast", length, to=int(ir.DataType.DOUBLE))
    grown = graph.op(at, "Mul", length, double(factor / most))
    stretch = graph.op(at, "Log", graph.op(at, "Sub", grown, double(factor - 1)))
    stretch = graph.op(at, "Mul", stretch, double(dim / (dim - 2)))
    theta = graph.op(at, "Add", stretch, double(math.log(rope.theta)))
    exponents = double(-np.arange(0, dim, 2, dtype=np.float64) / dim)
    frequencies = graph.op(at, "Exp", graph.op(at, "Mul", theta, exponents))  # [B, pairs]
    turns = graph.op(at, "Unsqueeze", _as(build, at, frequencies), graph.ints(1))
    places = _as(build, at, build.input("position_ids"))
    turns = graph.op(at, "Mul", graph.op(at, "Unsqueeze", places, graph.ints(2)), turns)
    parts = [graph.op(at, kind, turns) for kind in ("Cos", "Sin")]
    if graph.dtype != ir.DataType.FLOAT and not build.how.rotate_late:
        parts = [graph.op(at, "Cast", x, to=int(graph.dtype)) for x in parts]
    return Angles(parts[0], parts[1], None, (dim + 1) // 2)


def _as(build: Build, at: str, value: ir.Value) -> ir.Value:
    return build.graph.op(at, "Cast", value, to=int(ir.DataType.FLOAT))
