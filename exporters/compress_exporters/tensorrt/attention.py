"""Attention as TensorRT takes it: keys and values by concatenation, four dimensions, one mask."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compress.arch.forward.kinds import Grouped
from compress.arch.layer_cache import HeadShape
from compress.arch.spec import BlockSpec
from compress_exporters.onnx.graph.attention import PAST, PRESENT, kept, place
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.mask import mask
from compress_exporters.onnx.graph.rotary import rotated
from compress_exporters.tensorrt.lint.operators import FUSED_HEADS, FUSED_TYPES


def attend(build: Build, block: BlockSpec, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
    """q, k, v: [B, S, heads of each * width] -> [B, S, heads * value width]."""
    at, layer = place(block), build.how.grouped(block.index)
    q, k = rotated(build, at, layer, q, k)
    keys, values = (
        _state(build, block, name, shape, new)
        for (name, shape), new in zip(kept(build.how, block.index), (k, v), strict=True)
    )
    inputs = Inputs(q, keys, values, mask(build, layer.window))
    why = _why_not_fused(build, layer)
    if why is None:
        out = _fused(build, at, inputs, layer)
    else:
        out = _spelled(build, at, inputs, layer)
        build.unfused["Attention"] = f"{why}, so it is spelled out"
    flat = build.graph.ints(0, 0, layer.heads * layer.value_width)
    return build.graph.op(at, "Reshape", out, flat)


def _state(build: Build, block: BlockSpec, name: str, shape: HeadShape, new: ir.Value) -> ir.Value:
    """Keys or values of the past and of these tokens, [B, kv_heads, total, width]."""
    graph, at = build.graph, place(block)
    new = graph.op(at, "Reshape", new, graph.ints(0, 0, *shape))
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


def _why_not_fused(build: Build, layer: Grouped) -> str | None:
    """Why TensorRT has no kernel that does all of attention; None where it has."""
    if layer.softcap is not None:
        return "TensorRT's has no soft cap"
    if build.graph.dtype.name not in FUSED_TYPES:
        return "TensorRT's is for types of 16 bits (--dtype fp16)"
    if layer.value_width != layer.key_width:
        return "TensorRT's is for values as wide as keys"
    if layer.key_width not in FUSED_HEADS:
        least, most, step = FUSED_HEADS[0], FUSED_HEADS[-1], FUSED_HEADS.step
        return f"TensorRT's is for heads of {least} to {most}, in steps of {step}"
    return None


def _fused(build: Build, at: str, inputs: Inputs, layer: Grouped) -> ir.Value:
    """[B, S, heads, value width]. Heads are counted by the second dimension, not by attributes."""
    graph = build.graph
    q = graph.op(at, "Reshape", inputs.q, graph.ints(0, 0, layer.heads, layer.key_width))
    q = graph.op(at, "Transpose", q, perm=[0, 2, 1, 3])
    out = graph.op(at, "Attention", q, inputs.keys, inputs.values, inputs.seen, scale=layer.scale)
    return graph.op(at, "Transpose", out, perm=[0, 2, 1, 3])


def _spelled(build: Build, at: str, inputs: Inputs, layer: Grouped) -> ir.Value:
    """[B, S, kv_heads, heads of each, value width], in single steps."""
    graph, cap = build.graph, layer.softcap
    group = layer.heads // layer.kv_heads
    shape = graph.ints(0, 0, layer.kv_heads, group, layer.key_width)
    q = graph.op(at, "Transpose", graph.op(at, "Reshape", inputs.q, shape), perm=[0, 2, 3, 1, 4])
    q = graph.op(at, "Mul", q, graph.number(layer.scale / (cap or 1.0)))
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
