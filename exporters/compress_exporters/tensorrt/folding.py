"""A graph for runtimes that have no 4-bit floats: their weights decoded by ONNX's own reference."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from compress_exporters.onnx.graph.graph import INLINE
from compress_exporters.onnx.saving import DATA, MODEL

DQ, FP4 = "DequantizeLinear", ir.DataType.FLOAT4E2M1


def has_fp4(model: Path) -> bool:
    """Whether a graph has weights of 4-bit floats."""
    values = ir.load(model).graph.initializers.values()
    return any(value.dtype == FP4 for value in values)


def folded(model: Path, folder: Path) -> Path:
    """Writes the graph into `folder` with decoded weights in place of codes and scales, one of
    them in memory at a time."""
    found = ir.load(model)
    graph = found.graph
    for node in tuple(graph):
        weight = node.inputs[0] if node.op_type == DQ else None
        if weight is None or weight.dtype != FP4:
            continue
        inner, out = _maker(node), node.outputs[0]
        decoded = _decoded(node, inner, out)
        graph.register_initializer(decoded)
        ir.convenience.replace_all_uses_with(out, decoded)
        graph.remove([node, inner], safe=True)
        graph.initializers.pop(str(weight.name))
    ir.save(found, folder / MODEL, external_data=DATA, size_threshold_bytes=INLINE)
    return folder / MODEL


def _maker(node: ir.Node) -> ir.Node:
    """The node that decodes the scales."""
    scale = node.inputs[1]
    assert scale is not None, "4-bit floats have scales"
    made = scale.producer()
    assert made is not None, "scales of 4-bit floats are codes themselves"
    return made


def _decoded(node: ir.Node, inner: ir.Node, out: ir.Value) -> ir.Value:
    weight = node.inputs[0]
    assert weight is not None
    shape = weight.shape
    assert shape is not None
    name = f"{weight.name}.decoded"
    protos = ir.to_proto(inner), ir.to_proto(node)
    inputs = [x for x in (*inner.inputs, weight) if x is not None]

    def read() -> ir.TensorProtocol:
        known = {str(x.name): _numbers(x) for x in inputs}
        for proto in protos:
            found: Any = ReferenceEvaluator(proto).run(None, known)
            known[proto.output[0]] = found[0]
        return ir.Tensor(np.asarray(known[str(out.name)]))

    tensor = ir.LazyTensor(read, ir.DataType.FLOAT, shape, name=name)
    return ir.Value(
        name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=shape, const_value=tensor
    )


def _numbers(value: ir.Value) -> np.ndarray[Any, Any]:
    assert value.const_value is not None
    return value.const_value.numpy()
