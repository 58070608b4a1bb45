"""Both ends of a decoder: embedding and head."""

import numpy as np
import onnx_ir as ir

from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.dense import stored, turned
from compress_exporters.onnx.graph.linked import linked, wide


def embedding(build: Build) -> ir.Value:
    """[B, S, hidden], scaled, learned positions added."""
    at, source = build.spec.embedding.removesuffix(".weight"), build.weights
    if source.is_quantized(at):
        build.note("the token embedding is written decoded")
    return placed(build, _rows(build, at))


def _rows(build: Build, at: str) -> ir.Value:
    graph, ids, tensor = build.graph, build.input("input_ids"), build.spec.embedding
    there = linked(build, tensor)
    if there is None:
        return graph.op(at, "Gather", embedding_weight(build), ids, axis=0)
    # Only what was looked up is made wide, so that the table stays where it is for good.
    return wide(build, at, graph.op(at, "Gather", there, ids, axis=0), tensor)


def placed(build: Build, hidden: ir.Value) -> ir.Value:
    """Rows of the embedding [B, S, hidden], scaled, learned positions added."""
    graph, how = build.graph, build.how
    at = build.spec.embedding.removesuffix(".weight")
    if how.embedding_scale != 1:
        hidden = graph.op(at, "Mul", hidden, graph.number(how.embedding_scale))
    if how.positions is not None:
        hidden = graph.op(at, "Add", hidden, _positions(build))
    return hidden


def embedding_weight(build: Build) -> ir.Value:
    return stored(build, build.spec.embedding, shape=build.spec.embedding_shape)


def _positions(build: Build) -> ir.Value:
    graph, learned = build.graph, build.how.positions
    assert learned is not None
    at, rows = learned.tensor.removesuffix(".weight"), build.input("position_ids")
    if learned.offset:
        rows = graph.op(at, "Add", rows, graph.constant(np.array(learned.offset, np.int64)))
    return graph.op(at, "Gather", stored(build, learned.tensor), rows, axis=0)


def head(build: Build, x: ir.Value) -> ir.Value:
    """Logits, fp32 [B, S, rows of the head]."""
    graph, own = build.graph, build.spec.head_linear()
    if own is None:
        weight = turned(build, "head", build.spec.embedding)
        if weight is None:
            weight = graph.op("head", "Transpose", embedding_weight(build), perm=[1, 0])
        logits = graph.op("head", "MatMul", x, weight)
    else:
        logits = build.lowering.linear(build, own, x)
    return capped(build, logits)


def capped(build: Build, logits: ir.Value) -> ir.Value:
    """In fp32, behind the soft cap where there is one."""
    graph, cap = build.graph, build.how.final_softcap
    if graph.dtype != ir.DataType.FLOAT:
        logits = graph.op("head", "Cast", logits, to=int(ir.DataType.FLOAT))
    if cap is None:
        return logits
    number = graph.constant(np.array(cap, np.float32))
    small = graph.op("head", "Tanh", graph.op("head", "Div", logits, number))
    return graph.op("head", "Mul", small, number)
