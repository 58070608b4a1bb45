"""Attention as TensorRT takes it: keys and values by concatenation, four dimensions, one mask."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compress.arch.spec import BlockSpec
from compress_exporters.onnx.graph.attention import PAST, PRESENT, place
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.mask import mask
from compress_exporters.onnx.graph.rotary import rotate
from compress_exporters.tensorrt.lint.operators import FUSED_HEADS, FUSED_TYPES


def attend(build: Build, block: BlockSpec, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
    """q, k, v: [B, S, heads of each * head_dim] -> [B, S, heads * head_dim]."""
    how, at = build.how, place(block)
    layer = how.layers[block.index]
    if layer.rope is not None:
        q = rotate(build, at, q, layer.rope, how.heads)
        k = rotate(build, at, k, layer.rope, how.kv_heads)
    keys, values = _state(build, block, "key", k), _state(build, block, "value", v)
    inputs = Inputs(q, keys, values, mask(build, layer.window))
    why = _why_not_fused(build, layer.softcap)
    if why is None:
        out = _fused(build, at, inputs, layer.scale)
    else:
        out = _spelled(build, at, inputs, layer.scale, layer.softcap)
        build.unfused["Attention"] = f"{why}, so it is spelled out"
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


@dataclass(frozen=True, slots=True)
class Inputs:
    q: ir.Value
    keys: ir.Value
    values: ir.Value
    seen: ir.Value


def _why_not_fused(build: Build, cap: float | None) -> str | None:
    """Why TensorRT has no kernel that does all of attention; None where it has."""
    if cap is not None:
        return "TensorRT's has no soft cap"
    if build.graph.dtype.name not in FUSED_TYPES:
        return "TensorRT's is for types of 16 bits (--dtype fp16)"
    if build.how.head_dim not in FUSED_HEADS:
        least, most, step = FUSED_HEADS[0], FUSED_HEADS[-1], FUSED_HEADS.step
        return f"TensorRT's is for heads of {least} to {most}, in steps of {step}"
    return None


def _fused(build: Build, at: str, inputs: Inputs, scale: float) -> ir.Value:
    """[B, S, heads, head_dim]. Heads are counted by the second dimension, not by attributes."""
    graph, how = build.graph, build.how
    q = graph.op(at, "Reshape", inputs.q, graph.ints(0, 0, how.heads, how.head_dim))
    q = graph.op(at, "Transpose", q, perm=[0, 2, 1, 3])
    out = graph.op(at, "Attention", q, inputs.keys, inputs.values, inputs.seen, scale=scale)
    return graph.op(at, "Transpose", out, perm=[0, 2, 1, 3])


def _spelled(build: Build, at: str, inputs: Inputs, scale: float, cap: float | None) -> ir.Value:
    """[B, S, kv_heads, heads of each, head_dim], in single steps."""
    graph, how = build.graph, build.how
    shape = graph.ints(0, 0, how.kv_heads, how.heads // how.kv_heads, how.head_dim)
    q = graph.op(at, "Transpose", graph.op(at, "Reshape", inputs.q, shape), perm=[0, 2, 3, 1, 4])
    q = graph.op(at, "Mul", q, graph.number(scale / (cap or 1.0)))
    third = graph.ints(2)
    turned = graph.op(at, "Transpose", inputs.keys, perm=[0, 1, 3, 2])
    scores = graph.op(at, "MatMul", q, graph.op(at, "Unsqueeze", turned, third))
    if cap is not None:
        scores = graph.op(at, "Mul", graph.op(at, "Tanh", scores), graph.number(cap))
    nothing = graph.number(float(np.finfo(graph.dtype.numpy()).min))
    seen = graph.op(at, "Unsqueeze", inputs.seen, third)
    shares = graph.op(at, "Softmax", graph.op(at, "Where", seen, scores, nothing), axis=-1)
    out = graph.op(at, "MatMul", shares, graph.op(at, "Unsqueeze", inputs.values, third))
    return graph.op(at, "Transpose", out, perm=[0, 3, 1, 2, 4])
