"""Rules of single nodes: operators, attributes, inputs, types."""

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto

from compress_exporters.tensorrt.lint.facts import Facts, attribute, name_of
from compress_exporters.tensorrt.lint.findings import Finding
from compress_exporters.tensorrt.lint.operators import (
    DOMAINS,
    FLOATS,
    FUSED_HEADS,
    FUSED_TYPES,
    OPERATORS,
    OPSETS,
    QUANTIZED,
    SHAPE_OPERATORS,
    TOPK_BELOW,
    UNSUPPORTED,
    VERSION,
    Operator,
)

# Types that values may have; those of QUANTIZED are in the rules of quantization.
PLAIN = ("FLOAT", "FLOAT16", "BFLOAT16", "INT32", "INT64", "BOOL")


def opsets(facts: Facts) -> Iterator[Finding]:
    first, last = OPSETS
    for entry in facts.model.opset_import:
        at = f"opset of {entry.domain or 'ai.onnx'}"
        if entry.domain not in DOMAINS:
            yield Finding(at, f"TensorRT has no operators of {entry.domain}", "use ai.onnx only")
        elif not first <= entry.version <= last:
            what = f"it is {entry.version}, and TensorRT {VERSION} reads {first} to {last}"
            yield Finding(at, what, "export with opset 23")
    for function in facts.model.functions:
        yield Finding(function.name, "a function hides its nodes from this lint", "inline it")


def operators(facts: Facts) -> Iterator[Finding]:
    for node in facts.nodes:
        kind = node.op_type
        if node.domain not in DOMAINS:
            what = f"{node.domain}.{kind} is no operator of ai.onnx"
            yield Finding(node.name, what, "say it in operators of ai.onnx")
        elif kind in UNSUPPORTED:
            yield Finding(node.name, f"TensorRT has no {kind}", UNSUPPORTED[kind])
        elif kind not in OPERATORS:
            what = f"{kind} is none of the operators that decoders have in TensorRT {VERSION}"
            yield Finding(node.name, what, "say it in those of the table")


def restrictions(facts: Facts) -> Iterator[Finding]:
    """What the table's last column says."""
    for node, row in _rows(facts):
        yield from _attributes(node, row)
        for number in row.absent:
            if len(node.input) > number and node.input[number]:
                what = f"{node.op_type} takes no input {number} ({node.input[number]})"
                yield Finding(node.name, what, "keep the past by concatenation before it")
        for name in node.output[row.outputs :]:
            if name:
                what = f"{node.op_type} gives {row.outputs} output(s), and {name} is one more"
                yield Finding(node.name, what, "compute it with nodes of its own")
        for number, rank in row.ranks.items():
            found = facts.type(node.input[number]) if len(node.input) > number else None
            if found is not None and found.shape is not None and len(found.shape) != rank:
                what = f"input {number} of {node.op_type} has {len(found.shape)} dimensions"
                yield Finding(node.name, what, f"reshape it to {rank}")
    yield from _topk(facts)


def _attributes(node: NodeProto, row: Operator) -> Iterator[Finding]:
    for name, only in row.fixed.items():
        value = attribute(node, name)
        if value is not None and (only is None or value != only):
            what = f"{node.op_type} has {name} = {value}"
            remedy = "leave it out" if only is None else f"leave it out or make it {only}"
            yield Finding(node.name, what, remedy)


def _topk(facts: Facts) -> Iterator[Finding]:
    for node in facts.nodes:
        if node.op_type == "TopK" and node.input[1] in facts.constants:
            k = int(facts.values(node.input[1]).reshape(-1)[0])
            if k >= TOPK_BELOW:
                yield Finding(node.name, f"K is {k}", f"keep it below {TOPK_BELOW}")


def constants(facts: Facts) -> Iterator[Finding]:
    for node, row in _rows(facts):
        for number in row.constant:
            if len(node.input) > number and node.input[number]:
                name = node.input[number]
                if not facts.known(name):
                    what = f"input {number} ({name}) is computed when the engine runs"
                    yield Finding(node.name, what, "make it an initializer")


def shape_arithmetic(facts: Facts) -> Iterator[Finding]:
    """Shapes are made of shapes, by layers that can compute them."""
    for node, row in _rows(facts):
        for number in row.sizes:
            name = node.input[number] if len(node.input) > number else ""
            for maker in facts.makers(name, until="Shape"):
                if maker is None:
                    what = f"input {number} ({name}) depends on what goes into the graph"
                    yield Finding(node.name, what, "compute shapes of shapes")
                elif maker.op_type not in SHAPE_OPERATORS:
                    what = f"input {number} ({name}) is computed by {maker.op_type}"
                    yield Finding(node.name, what, f"use one of {', '.join(SHAPE_OPERATORS)}")


def types(facts: Facts) -> Iterator[Finding]:
    for node, row in _rows(facts):
        for number, name in enumerate(node.input):
            found = facts.type(name) if name else None
            allowed = row.other.get(number, row.types)
            if found is not None and found.dtype not in allowed:
                what = f"input {number} ({name}) is {found.dtype}, not {' or '.join(allowed)}"
                yield Finding(node.name, what, "cast it before")


def strong_typing(facts: Facts) -> Iterator[Finding]:
    """Inputs of one node are of one type: a strongly typed network converts nothing."""
    for node, row in _rows(facts):
        found = {}
        for number, name in enumerate(node.input):
            kind = facts.type(name) if name and number not in row.other else None
            if kind is not None:
                found[kind.dtype] = name
        if len(found) > 1:
            what = " and ".join(f"{name} is {dtype}" for dtype, name in found.items())
            yield Finding(node.name, what, "cast one of them")
        yield from _mask(facts, node)


def _mask(facts: Facts, node: NodeProto) -> Iterator[Finding]:
    """A mask of Attention is of truth values, or of the type of the queries."""
    if node.op_type != "Attention" or len(node.input) < 4 or not node.input[3]:
        return
    query, mask = (facts.type(node.input[number]) for number in (0, 3))
    if query and mask and mask.dtype not in ("BOOL", query.dtype):
        what = f"the mask is {mask.dtype} and queries are {query.dtype}"
        yield Finding(node.name, what, "make the mask BOOL")


def kernels(facts: Facts) -> Iterator[Finding]:
    """Attention is of types and heads that one kernel does: a builder takes no steps for it."""
    for node in facts.nodes:
        query = facts.type(node.input[0]) if node.op_type == "Attention" else None
        if query is None:
            continue
        if query.dtype not in FUSED_TYPES:
            what = f"Attention is of {query.dtype}, and kernels are of {' or '.join(FUSED_TYPES)}"
            yield Finding(node.name, what, "spell it out, or export with --dtype fp16")
        if query.shape is not None and query.shape[-1] not in FUSED_HEADS:
            least, most, step = FUSED_HEADS[0], FUSED_HEADS[-1], FUSED_HEADS.step
            what = f"heads have {query.shape[-1]}, and kernels {least} to {most} in steps of {step}"
            yield Finding(node.name, what, "spell it out")


def dtypes(facts: Facts) -> Iterator[Finding]:
    """No value of a type that TensorRT has not, or would convert."""
    allowed = (*PLAIN, *QUANTIZED)
    for name, found in facts.types.items():
        if found.dtype not in allowed:
            what = f"it is {found.dtype}, which an engine has no values of"
            yield Finding(name, what, f"store it as one of {', '.join(allowed)}")
    for node in facts.nodes:
        to = attribute(node, "to") if node.op_type == "Cast" else None
        if to is not None and name_of(to) not in PLAIN:
            what = f"Cast makes {name_of(to)}"
            yield Finding(node.name, what, f"cast to one of {', '.join(PLAIN)}")


def finite(facts: Facts) -> Iterator[Finding]:
    """Constants of the graph are numbers. (Weights were looked at when they were read.)"""
    for name, tensor in facts.constants.items():
        small = name_of(tensor.data_type) in FLOATS and not tensor.external_data
        if small and not np.isfinite(facts.values(name).astype(np.float32)).all():
            yield Finding(name, "a constant is not finite", "use the type's least number")


def _rows(facts: Facts) -> Iterator[tuple[NodeProto, Operator]]:
    """Nodes that the table has a row for; those that it has none for are found by `operators`."""
    for node in facts.nodes:
        row = OPERATORS.get(node.op_type)
        if row is not None and node.domain in DOMAINS:
            yield node, row
