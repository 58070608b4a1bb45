"""GroupQueryAttention: keys and values of the past, rotation, windows and soft caps in one.

It reads padding on the right only: keys count from the first token of a text on.
"""

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from compress.arch.forward.forward import ForwardSpec
from compress.arch.forward.kinds import Grouped
from compress.arch.forward.rope import Rope
from compress.arch.spec import BlockSpec, LinearSpec
from compress.errors import RecipeError
from compress_exporters.exporter import Options
from compress_exporters.genai.product import CONTRIB, Stack, can_stack, product
from compress_exporters.heads import shared_heads
from compress_exporters.onnx.graph.attention import PAST, PRESENT, place, states
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.dense import TORCH, as_ir
from compress_exporters.onnx.graph.rotary import angles, context, rotated, tables

HEAD_STEP = 8  # GroupQueryAttention's heads are a multiple of it,
ROTARY_STEP = 16  # and what it rotates a multiple of this


def require_heads(how: ForwardSpec) -> None:
    """RecipeError for heads that the operator does not take, CheckpointError for layers that have
    different ones."""
    heads = shared_heads(how, "onnx-genai's configuration")
    if heads.key_width != heads.value_width:
        raise RecipeError(
            f"heads of keys have {heads.key_width} numbers and those of values"
            f" {heads.value_width}, and onnx-genai's attention takes one size; export to onnx"
        )
    if heads.key_width % HEAD_STEP:
        raise RecipeError(
            f"heads have {heads.key_width} numbers, and onnx-genai's attention takes multiples of"
            f" {HEAD_STEP}; export to onnx"
        )


def why_not_rotated(how: ForwardSpec, rope: Rope, options: Options) -> str | None:
    """Why GroupQueryAttention cannot rotate, None where it does."""
    if rope.kind == "dynamic":
        return "frequencies depend on the length of the text"
    width = how.grouped(0).key_width
    if width % ROTARY_STEP or rope.dim % ROTARY_STEP:
        return f"{rope.dim} of {width} numbers of a head, not a multiple of {ROTARY_STEP}"
    if how.rotate_late and options.computed != "fp32":
        return "in fp32, and the rest is fp16"
    return None


def needs_positions(how: ForwardSpec, options: Options, length: int) -> bool:
    """Whether anything but GroupQueryAttention asks where a token stands. length: of the tables."""
    return how.positions is not None or any(
        why_not_rotated(how, rope, options) or (rope.length is not None and length > rope.length)
        for rope in how.ropes
    )


def attention(build: Build, block: BlockSpec, x: ir.Value) -> ir.Value:
    """x: [B, S, hidden], behind the norm -> what attention adds to the residual."""
    (last,) = (linear for linear in block.linears if linear.role == "o")
    packed = _packed(build, block)
    if packed is None:
        out = attend(build, block, *states(build, block, x))
    else:
        out = _group_query(build, block, product(build, packed, x), None, None)
    return build.lowering.linear(build, last, out)


def _packed(build: Build, block: BlockSpec) -> Stack | None:
    """Queries, keys and values as one product, where attention can take it as it comes."""
    how, layer = build.how, build.how.grouped(block.index)
    rope = layer.rope
    roles = {linear.role: linear for linear in block.linears}
    if how.norms.q is not None:
        norms = "queries and keys have norms, which attention computes on GPUs only"
        build.unfused["packed q/k/v"] = norms
        return None
    if rope is not None and (reason := why_not_rotated(how, rope, build.options)):
        build.unfused["rotation in attention, packed q/k/v"] = reason
        return None
    if "qkv" in roles:
        rows = None if layer.qkv == "parts" else _by_part(layer)
        return Stack(roles["qkv"].name, (roles["qkv"],), rows)
    linears: list[LinearSpec] = [roles[name] for name in ("q", "k", "v")]
    if not can_stack(build, linears):
        build.unfused["packed q/k/v"] = "their weights are stored in different ways"
        return None
    return Stack(f"{place(block)}.qkv", linears)


def _by_part(layer: Grouped) -> Tensor:
    """Rows of q, k, v of each head -> all of q, then k, then v."""
    rows = torch.arange(3 * layer.heads * layer.key_width)
    return rows.reshape(layer.heads, 3, layer.key_width).transpose(0, 1).reshape(-1)


def attend(build: Build, block: BlockSpec, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
    """[B, S, heads * head_dim] of normed queries, keys and values."""
    how, at = build.how, place(block)
    layer = how.grouped(block.index)
    if layer.rope is not None and (reason := why_not_rotated(how, layer.rope, build.options)):
        build.unfused["rotation in attention, packed q/k/v"] = reason
        q, k = rotated(build, at, layer, q, k)
    return _group_query(build, block, q, k, v)


def _group_query(
    build: Build, block: BlockSpec, q: ir.Value, k: ir.Value | None, v: ir.Value | None
) -> ir.Value:
    """q: with k and v behind it where they are None."""
    graph, how, index = build.graph, build.how, block.index
    layer = how.grouped(index)
    fused = layer.rope is not None and why_not_rotated(how, layer.rope, build.options) is None
    caches = _caches(build, layer.rope) if layer.rope is not None and fused else []
    past = [build.input(PAST.format(index, name)) for name in ("key", "value")]
    out, *present = graph.ops(
        place(block),
        "GroupQueryAttention",
        3,
        *(q, k, v, *past, *build.once("lengths", lambda: _lengths(build)), *caches),
        domain=CONTRIB,
        num_heads=layer.heads,
        kv_num_heads=layer.kv_heads,
        scale=float(layer.scale),
        do_rotary=int(fused),
        rotary_interleaved=0,
        local_window_size=-1 if layer.window is None else layer.window,
        softcap=float(layer.softcap or 0.0),
    )
    for name, value in zip(("key", "value"), present, strict=True):
        build.states[PRESENT.format(index, name)] = value
    return out


def _lengths(build: Build) -> tuple[ir.Value, ir.Value]:
    """Place of the last real token of each text, int32 [B]; length of the longest, int32."""
    graph, given, at = build.graph, build.input("attention_mask"), "mask"
    real = graph.op(at, "ReduceSum", given, graph.ints(1), keepdims=0)
    last = graph.op(at, "Sub", real, graph.constant(np.array(1, np.int64)))
    total = graph.op(at, "Gather", graph.op(at, "Shape", given), graph.constant(np.array(1)))
    cast = [graph.op(at, "Cast", x, to=int(ir.DataType.INT32)) for x in (last, total)]
    return cast[0], cast[1]


def _caches(build: Build, rope: Rope) -> list[ir.Value]:
    """Cosine and sine, [rows, pairs], and where tokens stand in them if that is not their place."""
    if build.lowering.positions:
        found = angles(build, rope)
        return [found.cos, found.sin, *([] if found.rows is None else [found.rows])]
    graph, positions = build.graph, context(build)
    at, shape = f"rotary.{build.how.ropes.index(rope)}", (positions, rope.dim // 2)

    def table(which: int, name: str) -> ir.Value:
        def read() -> ir.TensorProtocol:
            return as_ir(tables(rope, positions)[which].to(TORCH[graph.dtype]))

        return graph.weight(f"{at}.{name}", graph.dtype, shape, read)

    return [table(0, "cos"), table(1, "sin")]
