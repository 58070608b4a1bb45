"""A graph under construction: nodes by where they stand in the model, weights read when written."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

# The oldest that ONNX Runtime, OpenVINO and TensorRT all read beside opset 23.
IR_VERSION = 10
PRODUCER = "compress-model"
# Smaller initializers stay in the graph's file, where shape inference sees them.
INLINE = 1024
Dim = int | str


@dataclass(slots=True, eq=False)
class Graph:
    """dtype: of everything that is computed with fractions, FLOAT or FLOAT16.

    opsets: domain -> version. Values are nameless but for the names of their nodes, which are made
    unique: "model.layers.0.mlp/Mul", "model.layers.0.mlp/Mul_1".
    """

    dtype: ir.DataType
    opsets: dict[str, int]
    inputs: list[ir.Value] = field(default_factory=list)
    outputs: list[ir.Value] = field(default_factory=list)
    nodes: list[ir.Node] = field(default_factory=list)
    initializers: dict[str, ir.Value] = field(default_factory=dict)
    _names: Counter[str] = field(default_factory=Counter)
    _model: ir.Model | None = None

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[Dim]) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.inputs.append(value)
        return value

    def output(self, name: str, value: ir.Value, dtype: ir.DataType, shape: Sequence[Dim]) -> None:
        """Makes a node's value an output of the graph, under its own name."""
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(shape)
        self.outputs.append(value)

    def op(
        self, at: str, kind: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any
    ) -> ir.Value:
        """The one output of a node. at: where in the model it stands; None for no input."""
        return self.ops(at, kind, 1, *inputs, domain=domain, **attributes)[0]

    def ops(
        self,
        at: str,
        kind: str,
        count: int,
        *inputs: ir.Value | None,
        domain: str = "",
        **attributes: Any,
    ) -> tuple[ir.Value, ...]:
        """The `count` outputs of a node."""
        name = self._unique(f"{at}/{kind}")
        names = [name] if count == 1 else [f"{name}:{i}" for i in range(count)]
        outputs = [ir.Value(name=x) for x in names]
        node = ir.node(kind, inputs, attributes, domain=domain, outputs=outputs, name=name)
        self.nodes.append(node)
        return tuple(outputs)

    @contextmanager
    def in_fp32(self) -> Iterator[Callable[[str, ir.Value], ir.Value]]:
        """What is added meanwhile is computed in fp32. Yields what makes (at, value) of the graph's
        dtype wide."""
        dtype, wide = self.dtype, ir.DataType.FLOAT
        self.dtype = wide
        try:
            yield lambda at, x: x if dtype == wide else self.op(at, "Cast", x, to=int(wide))
        finally:
            self.dtype = dtype

    def narrow(self, at: str, x: ir.Value) -> ir.Value:
        """What was computed in fp32, in the graph's dtype."""
        if self.dtype == ir.DataType.FLOAT:
            return x
        return self.op(at, "Cast", x, to=int(self.dtype))

    def constant(self, array: np.ndarray[Any, Any]) -> ir.Value:
        """A small initializer; equal ones are one."""
        numbers = "_".join(str(x) for x in array.reshape(-1)[:4])
        shape = "x".join(map(str, array.shape))
        name = f"constant/{array.dtype}[{shape}]/{numbers}"
        known = self.initializers.get(name)
        if known is not None and np.array_equal(_numpy(known), array):
            return known
        return self._keep(self._unique(name), ir.tensor(array))

    def ints(self, *values: int) -> ir.Value:
        """int64 [n]."""
        return self.constant(np.array(values, np.int64))

    def number(self, value: float) -> ir.Value:
        """A scalar in the graph's dtype."""
        return self.constant(np.array(value, self.dtype.numpy()))

    def weight(
        self,
        name: str,
        dtype: ir.DataType,
        shape: Sequence[int],
        read: Callable[[], ir.TensorProtocol],
    ) -> ir.Value:
        """An initializer whose numbers are read when they are written; one for each name."""
        known = self.initializers.get(name)
        if known is not None:
            return known
        return self._keep(name, ir.LazyTensor(read, dtype, ir.Shape(shape), name=name))

    def linked(self, tensor: ir.ExternalTensor) -> ir.Value:
        """An initializer that lies in a file that is there already; one for each name."""
        assert tensor.name is not None
        known = self.initializers.get(tensor.name)
        return self._keep(tensor.name, tensor) if known is None else known

    def model(self, name: str, version: str) -> ir.Model:
        """The finished graph; the same object from then on, as a node is in one graph only."""
        if self._model is None:
            self._model = self._finished(name, version)
        return self._model

    def _finished(self, name: str, version: str) -> ir.Model:
        graph = ir.Graph(
            self.inputs,
            self.outputs,
            nodes=self.nodes,
            initializers=tuple(self.initializers.values()),
            opset_imports=self.opsets,
            name=name,
        )
        return ir.Model(
            graph,
            ir_version=IR_VERSION,
            producer_name=PRODUCER,
            producer_version=version,
        )

    def _keep(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        tensor.name = name
        shape = ir.Shape(tensor.shape.numpy())
        value = ir.Value(
            name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor
        )
        self.initializers[name] = value
        return value

    def _unique(self, name: str) -> str:
        count = self._names[name]
        self._names[name] += 1
        return f"{name}_{count}" if count else name


def _numpy(value: ir.Value) -> np.ndarray[Any, Any]:
    assert value.const_value is not None
    return value.const_value.numpy()
