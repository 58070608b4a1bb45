"""Attention: queries, keys and values of a block, and the operator that joins them."""

import onnx_ir as ir

from compress.arch.forward.forward import ForwardSpec
from compress.arch.forward.kinds import Grouped, Latent
from compress.arch.layer_cache import HeadShape
from compress.arch.spec import BlockSpec
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.mask import mask
from compress_exporters.onnx.graph.rotary import rotated

PAST = "past_key_values.{}.{}"
PRESENT = "present.{}.{}"
States = tuple[ir.Value, ir.Value, ir.Value]


def kept(how: ForwardSpec, layer: int) -> list[tuple[str, HeadShape]]:
    """What a layer keeps of a token: the names of its inputs and outputs, and their shapes."""
    if isinstance(how.layers[layer], Latent):
        return list(zip(("latent",), how.layers[layer].cache().parts, strict=True))
    return list(zip(("key", "value"), how.grouped(layer).cache().parts, strict=True))


def grouped_attention(build: Build, block: BlockSpec, x: ir.Value) -> ir.Value:
    """x: [B, S, hidden], behind the norm -> what attention adds to the residual."""
    out = build.lowering.attend(build, block, *states(build, block, x))
    (last,) = (linear for linear in block.linears if linear.role == "o")
    return build.lowering.linear(build, last, out)


def place(block: BlockSpec) -> str:
    """Where a block's attention stands, for names of nodes."""
    return f"{block.prefix}.attention"


def states(build: Build, block: BlockSpec, x: ir.Value) -> States:
    """Queries, keys and values, normed but not rotated: [B, S, heads of each * width]."""
    layer, names = build.how.grouped(block.index), build.how.norms
    roles = {linear.role: linear for linear in block.linears}
    if "qkv" in roles:
        q, k, v = _parted(build, block, build.lowering.linear(build, roles["qkv"], x))
    else:
        q, k, v = (build.lowering.linear(build, roles[name], x) for name in ("q", "k", "v"))
    q = _normed(build, layer, _below(block, names.q), q, layer.heads)
    k = _normed(build, layer, _below(block, names.k), k, layer.kv_heads)
    return q, k, v


def _parted(build: Build, block: BlockSpec, fused: ir.Value) -> States:
    """A fused q/k/v in its parts."""
    graph, layer, at = build.graph, build.how.grouped(block.index), place(block)
    if layer.qkv == "parts":
        q, k, v = graph.ops(at, "Split", 3, fused, graph.ints(*layer.widths), axis=-1)
        return q, k, v
    each = (layer.key_width, layer.key_width, layer.value_width)
    by_head = graph.op(at, "Reshape", fused, graph.ints(0, 0, layer.heads, sum(each)))
    if len(set(each)) == 1:
        parts = graph.ops(at, "Split", 3, by_head, axis=-1, num_outputs=3)
    else:
        parts = graph.ops(at, "Split", 3, by_head, graph.ints(*each), axis=-1)
    q, k, v = (
        graph.op(at, "Reshape", part, graph.ints(0, 0, layer.heads * width))
        for part, width in zip(parts, each, strict=True)
    )
    return q, k, v


def _below(block: BlockSpec, name: str | None) -> str | None:
    return None if name is None else f"{block.prefix}.{name}"


def _normed(build: Build, layer: Grouped, path: str | None, x: ir.Value, heads: int) -> ir.Value:
    if path is None:
        return x
    graph, width = build.graph, layer.key_width
    if layer.qk_norm == "full":
        return build.lowering.norm(build, path, x)
    by_head = graph.op(path, "Reshape", x, graph.ints(0, 0, heads, width))
    flat = graph.ints(0, 0, heads * width)
    return graph.op(path, "Reshape", build.lowering.norm(build, path, by_head), flat)


def attend(build: Build, block: BlockSpec, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
    """Rotation and the operator Attention, which keeps keys and values of the past itself."""
    graph, at, index = build.graph, place(block), block.index
    layer = build.how.grouped(index)
    q, k = rotated(build, at, layer, q, k)
    past = [build.input(PAST.format(index, name)) for name in ("key", "value")]
    out, *present = graph.ops(
        at,
        "Attention",
        3,
        *(q, k, v, mask(build, layer.window), *past),
        q_num_heads=layer.heads,
        kv_num_heads=layer.kv_heads,
        scale=layer.scale,
        softcap=layer.softcap or 0.0,
    )
    for name, value in zip(("key", "value"), present, strict=True):
        build.states[PRESENT.format(index, name)] = value
    return out
