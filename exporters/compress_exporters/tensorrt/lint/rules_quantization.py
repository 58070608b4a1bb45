"""Rules of explicit quantization: where Q and DQ stand, scales, zero points, blocks."""

from collections.abc import Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import NodeProto

from compress_exporters.tensorrt.lint.facts import Facts, Type, attribute, name_of
from compress_exporters.tensorrt.lint.findings import Finding
from compress_exporters.tensorrt.lint.operators import QUANTIZED

DQ, Q = "DequantizeLinear", "QuantizeLinear"
# Weights that share a scale, by their type; of 8 bits those of 4 bits are taken.
BLOCKS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "INT4": (64, 128),
        "FLOAT4E2M1": (16,),
        "INT8": (64, 128),
        "FLOAT8E4M3FN": (16, 64, 128),
    }
)
FOUR_BITS = ("INT4", "FLOAT4E2M1")


def quantized_constants(facts: Facts) -> Iterator[Finding]:
    """A quantized initializer goes to one DequantizeLinear, and there directly."""
    for name, tensor in facts.constants.items():
        if name_of(tensor.data_type) not in QUANTIZED:
            continue
        readers = facts.read.get(name, ())
        zeros = [node for node, number in readers if number == 2 and node.op_type in (DQ, Q)]
        if len(zeros) == len(readers) and zeros:
            continue
        if len(readers) != 1:
            what = f"{len(readers)} nodes read the quantized constant"
            yield Finding(name, what, f"one {DQ} reads it")
        elif readers[0][0].op_type != DQ or readers[0][1] != 0:
            node = readers[0][0]
            what = f"{node.op_type} ({node.name}) reads the quantized constant"
            yield Finding(name, what, f"{DQ} reads it directly; turn it before it is stored")


def quantized_values(facts: Facts) -> Iterator[Finding]:
    """A value is quantized only between a Q and a DQ with the same scale."""
    outputs = {value.name for value in facts.model.graph.output}
    for name, node in facts.made.items():
        found = facts.type(name)
        quantized = node.op_type == Q or (found is not None and found.dtype in QUANTIZED)
        if quantized and node.op_type not in (Q, "Constant"):
            assert found is not None
            what = f"{node.op_type} makes {found.dtype}"
            yield Finding(name, what, f"only {Q} makes quantized values")
        elif node.op_type == Q:
            yield from _pair(facts, node, name in outputs)


def _pair(facts: Facts, node: NodeProto, is_output: bool) -> Iterator[Finding]:
    if is_output:
        yield Finding(node.output[0], "a quantized value is an output", f"put {DQ} behind it")
    for reader, number in facts.read.get(node.output[0], ()):
        if reader.op_type != DQ or number != 0:
            what = f"{reader.op_type} ({reader.name}) reads a quantized value"
            yield Finding(node.name, what, f"put {DQ} between them")
        elif reader.input[1] != node.input[1]:
            what = f"{reader.name} has another scale, {reader.input[1]}"
            yield Finding(node.name, what, "give both the same")


def inputs_of_dq(facts: Facts) -> Iterator[Finding]:
    for node in _nodes(facts, DQ):
        maker = facts.made.get(node.input[0])
        if node.input[0] not in facts.constants and (maker is None or maker.op_type != Q):
            what = f"its input {node.input[0]} is no initializer and comes from no {Q}"
            yield Finding(node.name, what, f"quantize it with {Q}")


def scales(facts: Facts) -> Iterator[Finding]:
    """Known when the engine is built, above 0, finite, of the type they make."""
    for node in _nodes(facts, Q, DQ):
        name = _codes_of(facts, node.input[1]) or node.input[1]
        if name in facts.constants:
            values = facts.values(name).astype(np.float32)
            if not values.size or not bool((np.isfinite(values) & (values > 0)).all()):
                what = f"the scale {name} has numbers that are not above 0 and finite"
                yield Finding(node.name, what, "store 1 for weights that are all 0")
        else:
            what = f"the scale {name} is computed when the engine runs"
            yield Finding(node.name, what, "make it an initializer")
        made = attribute(node, "output_dtype") if node.op_type == DQ else None
        scale = facts.type(node.input[1])
        if made and scale is not None and name_of(made) != scale.dtype:
            what = f"it makes {name_of(made)} with a scale of {scale.dtype}"
            yield Finding(node.name, what, "store the scale in the type it makes, or cast behind")


def _codes_of(facts: Facts, name: str) -> str | None:
    """What scales are decoded from that are codes themselves: NVFP4's."""
    node = facts.made.get(name)
    return node.input[0] if node is not None and node.op_type == DQ else None


def zero_points(facts: Facts) -> Iterator[Finding]:
    for node in _nodes(facts, Q, DQ):
        if len(node.input) < 3 or not node.input[2]:
            continue
        name = node.input[2]
        if name in facts.constants and np.any(facts.values(name).astype(np.float32)):
            what = f"the zero point {name} is not 0"
            yield Finding(node.name, what, "quantize symmetrically")


def granularity(facts: Facts) -> Iterator[Finding]:
    """One scale; one for each channel of a weight; or one for each block of a weight."""
    for node in _nodes(facts, Q, DQ):
        data, scale = facts.type(node.input[0]), facts.type(node.input[1])
        if data is None or scale is None or scale.shape is None or data.shape is None:
            continue
        if all(dim == 1 for dim in scale.shape):
            continue
        if node.input[0] not in facts.constants:
            what = f"values are quantized with scales {list(scale.shape)}"
            yield Finding(node.name, what, "give values one scale; weights may have more")
        elif len(scale.shape) == 1:
            yield from _channels(node, data.shape, scale.shape)
        elif len(scale.shape) == len(data.shape):
            yield from _blocks(node, data, scale.shape)
        else:
            what = f"scales {list(scale.shape)} do not go with a weight {list(data.shape)}"
            yield Finding(node.name, what, "give them one dimension, or all of the weight's")


def _channels(node: NodeProto, data: Any, scale: Any) -> Iterator[Finding]:
    axis = attribute(node, "axis")
    axis = 1 if axis is None else axis
    if not -len(data) <= axis < len(data) or data[axis] != scale[0]:
        what = f"{scale[0]} scales on axis {axis} of a weight {list(data)}"
        yield Finding(node.name, what, "give each channel of the axis one scale")


def _blocks(node: NodeProto, data: Type, scale: Any) -> Iterator[Finding]:
    shape: Any = data.shape
    blocked = [i for i in range(len(shape)) if shape[i] != scale[i]]
    if len(blocked) != 1 or blocked[0] < len(shape) - 2:
        what = f"scales {list(scale)} block a weight {list(shape)} along {len(blocked)} dimensions"
        yield Finding(node.name, what, "block one of the last two")
        return
    axis = blocked[0]
    given = attribute(node, "axis")
    size, said = -(-shape[axis] // scale[axis]), attribute(node, "block_size")
    if size * scale[axis] != shape[axis]:
        what = f"{scale[axis]} blocks do not divide {shape[axis]}"
        yield Finding(node.name, what, "take a size that divides the dimension")
    elif size not in BLOCKS[data.dtype]:
        sizes = " or ".join(map(str, BLOCKS[data.dtype]))
        yield Finding(node.name, f"{data.dtype} in blocks of {size}", f"take blocks of {sizes}")
    if said != size or (1 if given is None else given) % len(shape) != axis:
        what = f"axis {given} and block_size {said} say otherwise than scales {list(scale)}"
        yield Finding(node.name, what, f"axis is {axis} and block_size {size}")


def four_bits(facts: Facts) -> Iterator[Finding]:
    """Weights only, and an even number of them: two are packed in a byte."""
    for name, tensor in facts.constants.items():
        if name_of(tensor.data_type) in FOUR_BITS and prod(tensor.dims) % 2:
            yield Finding(name, "an odd number of codes of 4 bits", "pad the weight")
    for node in _nodes(facts, Q):
        found = facts.type(node.output[0])
        if found is not None and found.dtype in FOUR_BITS:
            yield Finding(node.name, f"it rounds values to {found.dtype}", "round to 8 bits")


def what_dq_feeds(facts: Facts) -> Iterator[Finding]:
    """A decoded weight goes to a product directly, else kernels of fewer bits are out of reach."""
    for node in _nodes(facts, DQ):
        if node.input[0] not in facts.constants:
            continue
        for reader, _ in _behind_casts(facts, node.output[0]):
            scale_of = reader.op_type == DQ
            if reader.op_type not in ("MatMul", "Gemm", "Gather") and not scale_of:
                what = f"{reader.op_type} ({reader.name}) reads the decoded weight"
                yield Finding(node.name, what, "store the weight as the product reads it")


def _behind_casts(facts: Facts, name: str) -> Iterator[tuple[NodeProto, int]]:
    for node, number in facts.read.get(name, ()):
        if node.op_type == "Cast":
            yield from _behind_casts(facts, node.output[0])
        else:
            yield node, number


def _nodes(facts: Facts, *kinds: str) -> Iterator[NodeProto]:
    return (node for node in facts.nodes if node.op_type in kinds)
