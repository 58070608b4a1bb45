"""Latent attention: one head of keys and values for all queries, and one tensor of the past.

Queries go into the space of latents first, and values come out of it last. So a graph makes no key
and no value of any token, and takes one path for prompts and for single tokens.

Not the operator Attention, which ONNX Runtime 1.32 computes head by head: here heads stand below
each other as rows of one product, for a token behind 1023 a third of the time, for a prompt more
than half as much again (`python -m benchmarks.export.latents`).
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compress.arch.forward.kinds import Latent
from compress.arch.spec import BlockSpec, LinearSpec
from compress.quant.tensor import InputQuantization
from compress_exporters.onnx.graph.attention import PAST, PRESENT, place
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.dense import written
from compress_exporters.onnx.graph.graph import Graph
from compress_exporters.onnx.graph.linked import copied
from compress_exporters.onnx.graph.mask import mask
from compress_exporters.onnx.graph.norms import norm
from compress_exporters.onnx.graph.rotary import rotated_heads
from compress_exporters.onnx.graph.rounding import scaled


def latent_attention(build: Build, block: BlockSpec, x: ir.Value) -> ir.Value:
    """x: [B, S, hidden], behind the norm -> what attention adds to the residual."""
    graph, at, how = build.graph, place(block), kind_of(build, block)
    keys, values = _unfolding(build, how, _linear(block, "kv_b"))
    nope, turned = _queries(build, block, x)
    new = _latents(build, block, x)
    past = build.input(PAST.format(block.index, "latent"))
    total = graph.op(at, "Concat", past, new, axis=2)
    build.states[PRESENT.format(block.index, "latent")] = total
    q = graph.op(at, "Concat", graph.op(at, "MatMul", nope, keys), turned, axis=-1)
    sums = read(graph, at, how, LatentQueries(q, total, mask(build, how.window)))
    out = graph.op(at, "MatMul", sums, values)
    build.unfused["Attention"] = "of latents: heads are rows of one product with all latents"
    if graph.dtype != ir.DataType.FLOAT:
        build.note("latents are made in fp32 up to their norm")
    out = graph.op(at, "Transpose", out, perm=[0, 2, 1, 3])
    out = graph.op(at, "Reshape", out, graph.ints(0, 0, how.heads * how.value_width))
    return build.lowering.linear(build, _linear(block, "o"), out)


def kind_of(build: Build, block: BlockSpec) -> Latent:
    how = build.how.layers[block.index]
    assert isinstance(how, Latent), "KINDS has other functions for other kinds"
    return how


def _linear(block: BlockSpec, role: str) -> LinearSpec:
    return next(linear for linear in block.linears if linear.role == role)


def _queries(build: Build, block: BlockSpec, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Of each head what has no position, [B, heads, S, nope], and what is rotated, [B, heads, S,
    rotated]."""
    graph, at, how = build.graph, place(block), kind_of(build, block)
    if how.query_rank is None:
        q = build.lowering.linear(build, _linear(block, "q"), x)
    else:
        with graph.in_fp32() as wide:
            q = build.lowering.linear(build, _linear(block, "q_a"), wide(at, x))
            q = norm(build, f"{block.prefix}.{build.how.norms.query_latent}", q, how.eps)
        q = build.lowering.linear(build, _linear(block, "q_b"), graph.narrow(at, q))
    q = graph.op(at, "Reshape", q, graph.ints(0, 0, how.heads, how.key_width))
    q = graph.op(at, "Transpose", q, perm=[0, 2, 1, 3])
    nope, turned = graph.ops(at, "Split", 2, q, graph.ints(how.nope, how.rotated), axis=-1)
    return nope, _rotated(build, block, turned)


def _latents(build: Build, block: BlockSpec, x: ir.Value) -> ir.Value:
    """Latents, normed, and rotated keys behind them, [B, 1, S, rank + rotated]."""
    graph, at, how = build.graph, place(block), kind_of(build, block)
    # A retrofit's latents are of 1e-7 before their norm, which fp16 is too coarse for.
    with graph.in_fp32() as wide:
        both = build.lowering.linear(build, _linear(block, "kv_a"), wide(at, x))
        latent, key = graph.ops(at, "Split", 2, both, graph.ints(how.rank, how.rotated), axis=-1)
        latent = norm(build, f"{block.prefix}.{build.how.norms.kv_latent}", latent, how.eps)
    inputs = build.weights.activation(_linear(block, "kv_b").name)
    latent, key = graph.narrow(at, latent), graph.narrow(at, key)
    if inputs is not None:
        latent = _rounded(build, inputs, latent)
    parts = [graph.op(at, "Unsqueeze", part, graph.ints(1)) for part in (latent, key)]
    return graph.op(at, "Concat", parts[0], _rotated(build, block, parts[1]), axis=-1)


def _rounded(build: Build, inputs: InputQuantization, latent: ir.Value) -> ir.Value:
    """As the linear that is cut into heads would round them."""
    factor = inputs.factor
    if factor is None:
        return build.lowering.rounded(build, inputs, latent)
    out = build.lowering.rounded(build, inputs, scaled(build, latent, factor))
    return scaled(build, out, 1 / factor.float())


def _rotated(build: Build, block: BlockSpec, x: ir.Value) -> ir.Value:
    """x: [B, heads, S, rotated]."""
    how = kind_of(build, block)
    if how.rope is None:
        return x
    return rotated_heads(build, place(block), how.rope, x, interleaved=how.interleaved)


def _unfolding(build: Build, how: Latent, spec: LinearSpec) -> tuple[ir.Value, ir.Value]:
    """What heads make keys of, [1, heads, nope, rank], and values, [1, heads, rank, value width]:
    decoded, as its rows are summed over in one and its columns in the other."""
    if build.weights.is_quantized(spec.name):
        build.note("what heads make of latents (kv_b) is written decoded")
    else:
        copied(build, spec.tensor, "what heads make of latents is cut into keys and values")
    sizes = (how.heads, how.nope + how.value_width, how.rank)
    keys = written(
        build,
        spec.tensor,
        lambda w: w.reshape(sizes)[None, :, : how.nope],
        (1, how.heads, how.nope, how.rank),
        name=f"{spec.name}.keys",
    )
    values = written(
        build,
        spec.tensor,
        lambda w: w.reshape(sizes)[None, :, how.nope :].transpose(2, 3),
        (1, how.heads, how.rank, how.value_width),
        name=f"{spec.name}.values",
    )
    return keys, values


@dataclass(frozen=True, slots=True)
class LatentQueries:
    """queries: [B, heads, S, width], in the space of latents. latents: with rotated keys behind
    them, [B, 1, total, width]. seen: [B, 1, S, total]."""

    queries: ir.Value
    latents: ir.Value
    seen: ir.Value


def read(graph: Graph, at: str, how: Latent, asked: LatentQueries) -> ir.Value:
    """Sums of latents, [B, heads, S, rank]. at: where the nodes stand."""
    q = graph.op(at, "Mul", asked.queries, graph.number(how.scale))
    # Heads and tokens as rows of the one head that there is; 0 keeps a size as it is.
    q = graph.op(at, "Reshape", q, graph.ints(0, 1, -1, how.rank + how.rotated))
    turned = graph.op(at, "Transpose", asked.latents, perm=[0, 1, 3, 2])
    scores = graph.op(at, "MatMul", q, turned)
    scores = graph.op(at, "Reshape", scores, graph.ints(0, how.heads, -1, 0))
    nothing = graph.number(float(np.finfo(graph.dtype.numpy()).min))
    scores = graph.op(at, "Where", asked.seen, scores, nothing)
    shares = graph.op(at, "Softmax", scores, axis=-1)
    shares = graph.op(at, "Reshape", shares, graph.ints(0, 1, -1, 0))
    out = graph.op(at, "MatMul", shares, values_of(graph, at, how, asked.latents))
    return graph.op(at, "Reshape", out, graph.ints(0, how.heads, -1, how.rank))


def values_of(graph: Graph, at: str, how: Latent, latents: ir.Value) -> ir.Value:
    """[B, 1, total, rank]."""
    return graph.op(at, "Slice", latents, graph.ints(0), graph.ints(how.rank), graph.ints(3))
