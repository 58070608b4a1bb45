"""Attention: queries, keys and values of a block, and the operator that joins them."""

import onnx_ir as ir

from compress.arch.spec import BlockSpec
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.mask import mask
from compress_exporters.onnx.graph.rotary import rotate

PAST = "past_key_values.{}.{}"
PRESENT = "present.{}.{}"
States = tuple[ir.Value, ir.Value, ir.Value]


def attention(build: Build, block: BlockSpec, x: ir.Value) -> ir.Value:
    """x: [B, S, hidden], behind the norm -> what attention adds to the residual."""
    out = build.lowering.attend(build, block, *states(build, block, x))
    (last,) = (linear for linear in block.linears if linear.role == "o")
    return build.lowering.linear(build, last, out)


def place(block: BlockSpec) -> str:
    """Where a block's attention stands, for names of nodes."""
    return f"{block.prefix}.attention"


def states(build: Build, block: BlockSpec, x: ir.Value) -> States:
    """Queries, keys and values, normed but not rotated: [B, S, heads of each * head_dim]."""
    how, roles = build.how, {linear.role: linear for linear in block.linears}
    if "qkv" in roles:
        q, k, v = _parted(build, block, build.lowering.linear(build, roles["qkv"], x))
    else:
        q, k, v = (build.lowering.linear(build, roles[name], x) for name in ("q", "k", "v"))
    q = _normed(build, block, how.norms.q, q, how.heads)
    k = _normed(build, block, how.norms.k, k, how.kv_heads)
    return q, k, v


def _parted(build: Build, block: BlockSpec, fused: ir.Value) -> States:
    """A fused q/k/v in its parts."""
    graph, how, at = build.graph, build.how, place(block)
    if how.qkv == "parts":
        sizes = [n * how.head_dim for n in (how.heads, how.kv_heads, how.kv_heads)]
        q, k, v = graph.ops(at, "Split", 3, fused, graph.ints(*sizes), axis=-1)
        return q, k, v
    by_head = graph.op(at, "Reshape", fused, graph.ints(0, 0, how.heads, 3 * how.head_dim))
    parts = graph.ops(at, "Split", 3, by_head, axis=-1, num_outputs=3)
    flat = graph.ints(0, 0, how.heads * how.head_dim)
    q, k, v = (graph.op(at, "Reshape", part, flat) for part in parts)
    return q, k, v


def _normed(build: Build, block: BlockSpec, name: str | None, x: ir.Value, heads: int) -> ir.Value:
    if name is None:
        return x
    graph, how, path = build.graph, build.how, f"{block.prefix}.{name}"
    if how.qk_norm == "full":
        return build.lowering.norm(build, path, x)
    by_head = graph.op(path, "Reshape", x, graph.ints(0, 0, heads, how.head_dim))
    flat = graph.ints(0, 0, heads * how.head_dim)
    return graph.op(path, "Reshape", build.lowering.norm(build, path, by_head), flat)


def attend(build: Build, block: BlockSpec, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
    """Rotation and the operator Attention, which keeps keys and values of the past itself."""
    graph, how, at, index = build.graph, build.how, place(block), block.index
    layer = how.layers[index]
    if layer.rope is not None:
        q = rotate(build, at, q, layer.rope, how.heads)
        k = rotate(build, at, k, layer.rope, how.kv_heads)
    past = [build.input(PAST.format(index, name)) for name in ("key", "value")]
    out, *present = graph.ops(
        at,
        "Attention",
        3,
        *(q, k, v, mask(build, layer.window), *past),
        q_num_heads=how.heads,
        kv_num_heads=how.kv_heads,
        scale=layer.scale,
        softcap=layer.softcap or 0.0,
    )
    for name, value in zip(("key", "value"), present, strict=True):
        build.states[PRESENT.format(index, name)] = value
    return out
