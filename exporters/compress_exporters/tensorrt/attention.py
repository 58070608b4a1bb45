"""Attention as TensorRT takes it: keys and values by concatenation, four dimensions, one mask."""

import numpy as np
import onnx_ir as ir

from compress.arch.spec import BlockSpec
from compress_exporters.onnx.attention import PAST, PRESENT, place
from compress_exporters.onnx.build import Build
from compress_exporters.onnx.mask import mask
from compress_exporters.onnx.rotary import rotate


def attend(build: Build, block: BlockSpec, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
    """q, k, v: [B, S, heads of each * head_dim] -> [B, S, heads * head_dim]."""
    how, at = build.how, place(block)
    layer = how.layers[block.index]
    if layer.rope is not None:
        q = rotate(build, at, q, layer.rope, how.heads)
        k = rotate(build, at, k, layer.rope, how.kv_heads)
    keys, values = _state(build, block, "key", k), _state(build, block, "value", v)
    seen = mask(build, layer.window)
    if layer.softcap is None:
        out = _fused(build, at, (q, keys, values, seen), layer.scale)
    else:
        out = _capped(build, at, (q, keys, values, seen), layer.scale, layer.softcap)
    return build.graph.op(at, "Reshape", out, build.graph.ints(0, 0, how.heads * how.head_dim))


def _state(build: Build, block: BlockSpec, name: str, new: ir.Value) -> ir.Value:
    """Keys or values of the past and of these tokens, [B, kv_heads, total, head_dim]."""
    graph, how, at = build.graph, build.how, place(block)
    new = graph.op(at, "Reshape", new, graph.ints(0, 0, how.kv_heads, how.head_dim))
    new = graph.op(at, "Transpose", new, perm=[0, 2, 1, 3])
    past = build.input(PAST.format(block.index, name))
    total = graph.op(at, "Concat", past, new, axis=2)
    build.states[PRESENT.format(block.index, name)] = total
    return total


Inputs = tuple[ir.Value, ir.Value, ir.Value, ir.Value]  # queries, keys, values, mask


def _fused(build: Build, at: str, inputs: Inputs, scale: float) -> ir.Value:
    """[B, S, heads, head_dim]. Heads are counted by the second dimension, not by attributes."""
    graph, how = build.graph, build.how
    q, keys, values, seen = inputs
    q = graph.op(at, "Reshape", q, graph.ints(0, 0, how.heads, how.head_dim))
    q = graph.op(at, "Transpose", q, perm=[0, 2, 1, 3])
    out = graph.op(at, "Attention", q, keys, values, seen, scale=scale)
    return graph.op(at, "Transpose", out, perm=[0, 2, 1, 3])


def _capped(build: Build, at: str, inputs: Inputs, scale: float, cap: float) -> ir.Value:
    """[B, S, kv_heads, heads of each, head_dim], in single steps: Attention has no soft cap."""
    graph, how = build.graph, build.how
    q, keys, values, seen = inputs
    shape = graph.ints(0, 0, how.kv_heads, how.heads // how.kv_heads, how.head_dim)
    q = graph.op(at, "Transpose", graph.op(at, "Reshape", q, shape), perm=[0, 2, 3, 1, 4])
    q = graph.op(at, "Mul", q, graph.number(scale / cap))
    third = graph.ints(2)
    turned = graph.op(at, "Transpose", keys, perm=[0, 1, 3, 2])
    scores = graph.op(at, "MatMul", q, graph.op(at, "Unsqueeze", turned, third))
    scores = graph.op(at, "Mul", graph.op(at, "Tanh", scores), graph.number(cap))
    nothing = graph.number(float(np.finfo(graph.dtype.numpy()).min))
    scores = graph.op(at, "Where", graph.op(at, "Unsqueeze", seen, third), scores, nothing)
    shares = graph.op(at, "Softmax", scores, axis=-1)
    out = graph.op(at, "MatMul", shares, graph.op(at, "Unsqueeze", values, third))
    build.unfused["Attention"] = "TensorRT's has no soft cap, so it is spelled out"
    return graph.op(at, "Transpose", out, perm=[0, 3, 1, 2, 4])
