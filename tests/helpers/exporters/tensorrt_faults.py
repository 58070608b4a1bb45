"""Faults put into graphs that are right, one or more for every rule of TensorRT's lint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from compress_exporters.onnx.saving import DATA


@dataclass(frozen=True, slots=True)
class Seed:
    """rule: that must find it. graph: which of the right ones is changed. says: part of a finding.

    put: changes the model, or the files in its folder.
    """

    rule: str
    graph: str
    says: str
    put: Callable[[ModelProto, Path], None]


def node(model: ModelProto, kind: str, reads: str = "") -> NodeProto:
    """The first node of a kind, that reads a value whose name has a part."""
    found = (x for x in model.graph.node if x.op_type == kind)
    return next(x for x in found if any(reads in name for name in x.input))


def constant(model: ModelProto, name: str) -> TensorProto:
    return next(x for x in model.graph.initializer if name in x.name)


def to(kind: str, op: str, domain: str = "") -> Callable[[ModelProto, Path], None]:
    def put(model: ModelProto, _: Path) -> None:
        found = node(model, kind)
        found.op_type, found.domain = op, domain

    return put


def attribute(
    kind: str, name: str, value: Any, reads: str = ""
) -> Callable[[ModelProto, Path], None]:
    def put(model: ModelProto, _: Path) -> None:
        found = node(model, kind, reads)
        kept = [x for x in found.attribute if x.name != name]
        del found.attribute[:]
        found.attribute.extend([*kept, helper.make_attribute(name, value)])

    return put


def between(
    kind: str, number: int, op: str, **attributes: Any
) -> Callable[[ModelProto, Path], None]:
    """A node put before an input of another."""

    def put(model: ModelProto, _: Path) -> None:
        found = node(model, kind)
        new = helper.make_node(op, [found.input[number]], ["seeded"], "seeded", **attributes)
        found.input[number] = "seeded"
        insert(model, found, new)

    return put


def insert(model: ModelProto, before: NodeProto, new: NodeProto) -> None:
    model.graph.node.insert(list(model.graph.node).index(before), new)


def values(
    name: str, change: Callable[[Any], Any], dtype: Any = None
) -> Callable[[ModelProto, Path], None]:
    """A constant with other numbers, kept in the graph."""

    def put(model: ModelProto, folder: Path) -> None:
        tensor = constant(model, name)
        changed = change(numpy_helper.to_array(tensor, str(folder)).copy())
        tensor.CopyFrom(numpy_helper.from_array(np.asarray(changed, dtype), tensor.name))

    return put


def first(to: float) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array.reshape(-1)[0] = to
        return array

    return change


def extra(kind: str, index: int, name: str) -> Callable[[ModelProto, Path], None]:
    """One more input, after as many left out as are needed."""

    def put(model: ModelProto, _: Path) -> None:
        found = node(model, kind)
        found.input.extend([""] * (index - len(found.input)) + [name])

    return put


def zero_point(kind: str, dtype: Any) -> Callable[[ModelProto, Path], None]:
    def put(model: ModelProto, folder: Path) -> None:
        found = node(model, kind)
        scale = numpy_helper.to_array(constant(model, found.input[1]), str(folder))
        ones = np.ones(scale.shape, dtype)
        model.graph.initializer.append(numpy_helper.from_array(ones, "seeded"))
        found.input.append("seeded")
        kept = [x for x in found.attribute if x.name != "output_dtype"]
        del found.attribute[:]
        found.attribute.extend(kept)

    return put


def computed(kind: str, number: int) -> Callable[[ModelProto, Path], None]:
    """An input that depends on the inputs of the graph."""

    def put(model: ModelProto, _: Path) -> None:
        found = node(model, kind)
        zero = helper.make_node("Shape", ["input_ids"], ["seeded"], "seeded", start=1, end=1)
        joined = helper.make_node(
            "Concat", [found.input[number], "seeded"], ["seeded_2"], "seeded_2", axis=0
        )
        found.input[number] = "seeded_2"
        insert(model, found, zero)
        insert(model, found, joined)

    return put


def drop_cast(model: ModelProto, _: Path) -> None:
    found = node(model, "CumSum")
    found.input[0] = "attention_mask"


def second_output(model: ModelProto, _: Path) -> None:
    node(model, "Attention").output.append("seeded")


def three_dimensions(model: ModelProto, _: Path) -> None:
    """A mask without the dimension of heads."""
    found = node(model, "Attention")
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "seeded_axes"))
    insert(
        model,
        found,
        helper.make_node("Squeeze", [found.input[3], "seeded_axes"], ["seeded"], "seeded"),
    )
    found.input[3] = "seeded"


def attention(dtype: int, size: int) -> Callable[[ModelProto, Path], None]:
    """Queries, keys and values of another type; heads of the first two cut to another size."""

    def put(model: ModelProto, _: Path) -> None:
        found = node(model, "Attention")
        for name, numbers in (("from", [0]), ("to", [size]), ("axis", [3])):
            array = numpy_helper.from_array(np.array(numbers), f"seeded_{name}")
            model.graph.initializer.append(array)
        for number in range(3):
            names = [f"seeded_{number}_{part}" for part in ("cut", "cast")]
            ends = ["seeded_from", "seeded_to", "seeded_axis"] if number < 2 else []
            kind, cut = "Slice" if ends else "Identity", [found.input[number], *ends]
            insert(model, found, helper.make_node(kind, cut, names[:1], names[0]))
            cast = helper.make_node("Cast", names[:1], names[1:], names[1], to=dtype)
            insert(model, found, cast)
            found.input[number] = names[1]

    return put


def other_scale(model: ModelProto, _: Path) -> None:
    found = next(x for x in model.graph.node if x.op_type == "DequantizeLinear" and not x.attribute)
    array = numpy_helper.to_array(constant(model, found.input[1]))
    model.graph.initializer.append(numpy_helper.from_array(array * 2, "seeded"))
    found.input[1] = "seeded"


def quantized_output(model: ModelProto, _: Path) -> None:
    made = node(model, "QuantizeLinear").output[0]
    dims = ["batch_size", "sequence_length", 128]
    model.graph.output.append(helper.make_tensor_value_info(made, TensorProto.INT8, dims))


def reads_codes(model: ModelProto, _: Path) -> None:
    made = node(model, "QuantizeLinear").output[0]
    model.graph.node.append(helper.make_node("Identity", [made], ["seeded"], "seeded"))


def second_reader(model: ModelProto, _: Path) -> None:
    found = node(model, "DequantizeLinear")
    again = helper.make_node("Identity", [found.input[0]], ["seeded"], "seeded")
    model.graph.node.append(again)


def unread(model: ModelProto, _: Path) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.ones(4, np.int8), "seeded"))


def given_codes(model: ModelProto, _: Path) -> None:
    found = node(model, "DequantizeLinear")
    dims = constant(model, found.input[0]).dims
    value = helper.make_tensor_value_info("seeded", TensorProto.INT4, dims)
    model.graph.input.append(value)
    found.input[0] = "seeded"


def by_channel(model: ModelProto, _: Path) -> None:
    """A scale for each column of what is rounded."""
    for kind in ("QuantizeLinear", "DequantizeLinear"):
        found = next(x for x in model.graph.node if x.op_type == kind and "inputs/" in x.name)
        scale = numpy_helper.to_array(constant(model, found.input[1]))
        many = numpy_helper.from_array(np.full(128, scale), f"seeded_{kind}")
        model.graph.initializer.append(many)
        found.input[1] = many.name
        found.attribute.append(helper.make_attribute("axis", 2))


def odd_codes(model: ModelProto, _: Path) -> None:
    tensor = helper.make_tensor("seeded", TensorProto.INT4, [3, 1], [1, 2, 3])
    scale = numpy_helper.from_array(np.float32(1), "seeded_scale")
    model.graph.initializer.extend([tensor, scale])
    inputs = ["seeded", "seeded_scale"]
    model.graph.node.append(helper.make_node("DequantizeLinear", inputs, ["seeded_out"], "seeded"))


def blocks(count: Callable[[int], int]) -> Callable[[ModelProto, Path], None]:
    """Other blocks of a weight; block_size says so."""

    def put(model: ModelProto, folder: Path) -> None:
        found = node(model, "DequantizeLinear")
        k, n = constant(model, found.input[0]).dims
        groups = count(k)
        ones = np.ones((groups, n), np.float32)
        constant(model, found.input[1]).CopyFrom(numpy_helper.from_array(ones, found.input[1]))
        del found.attribute[:]
        size = {"axis": 0, "block_size": -(-k // groups)}
        found.attribute.extend(helper.make_attribute(name, x) for name, x in size.items())

    return put


def hidden(model: ModelProto) -> str:
    """What the last norm reads."""
    return str(node(model, "RMSNormalization", "model.norm").input[0])


def given_shape(model: ModelProto, _: Path) -> None:
    shape = helper.make_tensor_value_info("shape", TensorProto.INT64, ["rank"])
    model.graph.input.append(shape)
    new = helper.make_node("Reshape", [hidden(model), "shape"], ["seeded"], "seeded")
    model.graph.node.append(new)


def nameless(model: ModelProto, _: Path) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].Clear()


def free_heads(model: ModelProto, _: Path) -> None:
    state = next(x for x in model.graph.input if x.name == "past_key_values.1.key")
    state.type.tensor_type.shape.dim[1].dim_param = "heads"


def lost_state(model: ModelProto, _: Path) -> None:
    kept = [x for x in model.graph.output if x.name != "present.1.value"]
    del model.graph.output[:]
    model.graph.output.extend(kept)


def before_the_past(model: ModelProto, _: Path) -> None:
    found = node(model, "Concat", "past_key_values.0.key")
    inputs = list(found.input)
    found.input[0], found.input[1] = inputs[1], inputs[0]


def misfit(model: ModelProto, _: Path) -> None:
    node(model, "MatMul", "down_proj").input[0] = hidden(model)


def entry(key: str, value: str) -> Callable[[ModelProto, Path], None]:
    def put(model: ModelProto, _: Path) -> None:
        tensor = next(x for x in model.graph.initializer if x.external_data)
        next(x for x in tensor.external_data if x.key == key).value = value

    return put


def moved(model: ModelProto, _: Path) -> None:
    for tensor in model.graph.initializer:
        for x in tensor.external_data:
            x.value = f"/elsewhere/{DATA}" if x.key == "location" else x.value


def cut_off(_: ModelProto, folder: Path) -> None:
    data = folder / DATA
    data.write_bytes(data.read_bytes()[:-1])


def absent(_: ModelProto, folder: Path) -> None:
    (folder / DATA).unlink()


def imported(domain: str, version: int) -> Callable[[ModelProto, Path], None]:
    def put(model: ModelProto, _: Path) -> None:
        if domain == "":
            model.opset_import[0].version = version
        else:
            model.opset_import.append(helper.make_opsetid(domain, version))

    return put


def a_function(model: ModelProto, _: Path) -> None:
    inner = helper.make_node("Identity", ["x"], ["y"])
    opset = [helper.make_opsetid("", 23)]
    made = helper.make_function("own", "Double", ["x"], ["y"], [inner], opset)
    model.functions.append(made)
