"""What the lint knows of a graph: types and shapes of all values, who makes and who reads them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from compress.errors import CheckpointError

Shape = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Type:
    """dtype: ONNX's name. shape: None where the rank is not known, "" for a nameless dimension."""

    dtype: str
    shape: Shape | None


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """model: without its external data. folder: where that lies. failure: why shapes could not be
    inferred, "" where they could. types, made, read: by names of values; read: (node, input)."""

    model: ModelProto
    folder: Path
    failure: str
    types: Mapping[str, Type]
    constants: Mapping[str, TensorProto]
    made: Mapping[str, NodeProto]
    read: Mapping[str, tuple[tuple[NodeProto, int], ...]]

    @classmethod
    def of(cls, path: Path) -> "Facts":
        """CheckpointError for a file that is no model."""
        try:
            model = onnx.load(path, load_external_data=False)
        except Exception as error:  # protobuf's own types have no common base with OSError
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{path} is no ONNX model: {reason}") from error
        inferred, failure = _inferred(model)
        graph = inferred.graph
        constants = {x.name: x for x in graph.initializer}
        for node in graph.node:
            value = attribute(node, "value")
            if node.op_type == "Constant" and isinstance(value, TensorProto):
                constants[node.output[0]] = value
        values = (*graph.input, *graph.output, *graph.value_info)
        types = {x.name: _type(x) for x in values if x.type.HasField("tensor_type")}
        types |= {name: Type(name_of(x.data_type), tuple(x.dims)) for name, x in constants.items()}
        made = {name: node for node in graph.node for name in node.output if name}
        return cls(model, path.parent, failure, types, constants, made, _readers(graph))

    @property
    def nodes(self) -> Iterator[NodeProto]:
        return iter(self.model.graph.node)

    def type(self, name: str) -> Type | None:
        return self.types.get(name)

    def known(self, name: str) -> bool:
        """Whether a value is known when the engine is built: an initializer, or made of such."""
        return None not in self.makers(name)

    def makers(self, name: str, until: str = "") -> list[NodeProto | None]:
        """All nodes that a value comes from, but of constants; None for inputs of the graph. What
        is behind a node of the kind `until` does not count."""
        waiting, seen, found = [name], {""}, list[NodeProto | None]()
        while waiting:
            value = waiting.pop()
            if value in self.constants or value in seen:
                continue
            seen.add(value)
            maker = self.made.get(value)
            found.append(maker)
            if maker is not None and maker.op_type != until:
                waiting.extend(maker.input)
        return found

    def values(self, name: str) -> np.ndarray[Any, Any]:
        """Numbers of a constant. OSError and ValueError where its file does not hold them."""
        return numpy_helper.to_array(self.constants[name], str(self.folder))


def attribute(node: NodeProto, name: str) -> Any:
    """An attribute's value, None where it is not given; text is decoded."""
    found = next((x for x in node.attribute if x.name == name), None)
    if found is None:
        return None
    value = helper.get_attribute_value(found)
    return value.decode() if found.type == AttributeProto.STRING else value


def name_of(dtype: int) -> str:
    return str(TensorProto.DataType.Name(dtype))


def _inferred(model: ModelProto) -> tuple[ModelProto, str]:
    try:
        return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True), ""
    except onnx.shape_inference.InferenceError as error:
        return model, " ".join(str(error).split())


def _type(value: onnx.ValueInfoProto) -> Type:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return Type(name_of(tensor.elem_type), None)
    dims = (x.dim_value if x.HasField("dim_value") else x.dim_param for x in tensor.shape.dim)
    return Type(name_of(tensor.elem_type), tuple(dims))


def _readers(graph: onnx.GraphProto) -> dict[str, tuple[tuple[NodeProto, int], ...]]:
    found: dict[str, list[tuple[NodeProto, int]]] = {}
    for node in graph.node:
        for number, name in enumerate(node.input):
            if name:
                found.setdefault(name, []).append((node, number))
    return {name: tuple(readers) for name, readers in found.items()}
