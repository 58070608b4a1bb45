"""Activations by transformers' names, in operators that ONNX Runtime has kernels for."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import onnx_ir as ir

from compress_exporters.onnx.graph.graph import Graph

Activation = Callable[[Graph, str, ir.Value], ir.Value]


def _silu(graph: Graph, at: str, x: ir.Value) -> ir.Value:
    # Not Swish: ONNX Runtime spells it out with casts.
    return graph.op(at, "Mul", x, graph.op(at, "Sigmoid", x))


def _quick_gelu(graph: Graph, at: str, x: ir.Value) -> ir.Value:
    steep = graph.op(at, "Mul", x, graph.number(1.702))
    return graph.op(at, "Mul", x, graph.op(at, "Sigmoid", steep))


def _relu2(graph: Graph, at: str, x: ir.Value) -> ir.Value:
    positive = graph.op(at, "Relu", x)
    return graph.op(at, "Mul", positive, positive)


def _gelu_tanh(graph: Graph, at: str, x: ir.Value) -> ir.Value:
    return graph.op(at, "Gelu", x, approximate="tanh")


def _named(kind: str) -> Activation:
    return lambda graph, at, x: graph.op(at, kind, x)


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": _silu,
        "swish": _silu,
        "gelu": _named("Gelu"),
        "gelu_python": _named("Gelu"),
        "gelu_new": _gelu_tanh,
        "gelu_fast": _gelu_tanh,
        "gelu_accurate": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
        "gelu_python_tanh": _gelu_tanh,
        "quick_gelu": _quick_gelu,
        "relu": _named("Relu"),
        "relu2": _relu2,
        "sigmoid": _named("Sigmoid"),
        "tanh": _named("Tanh"),
        "linear": lambda graph, at, x: x,
    }
)
