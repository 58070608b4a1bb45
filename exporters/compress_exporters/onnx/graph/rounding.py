"""What a quantized linear does to its inputs, in operators: the arithmetic of fake_quantize."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from compress.quant.scheme import ActivationScheme
from compress.quant.tensor import InputQuantization
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.codes import Coded, scale_in
from compress_exporters.onnx.graph.dense import as_ir, rounded

AT = "inputs"
Array = np.ndarray[Any, Any]
QDQ_OFF = "session.disable_quant_qdq"


def prepared(build: Build, linear: Coded, x: ir.Value) -> ir.Value:
    """x times its input factor, its columns in the weight's order, rounded where the scheme rounds
    inputs with a fixed scale, and where that can be said."""
    factor, order = linear.beside.input_factor, linear.order
    if factor is not None:
        x = scaled(build, x, factor)
    inputs = build.weights.activation(linear.spec.name)
    x = x if inputs is None else as_rounded(build, inputs, x)
    return ordered(build, x, order)


def ordered(build: Build, x: ir.Value, order: Tensor | None) -> ir.Value:
    """x [..., K] with its columns in the order of a weight's groups; None as they are."""
    if order is None:
        return x
    build.note("columns with an order of their own (act-order) are put in it before the product")
    return picked(build, x, order)


def scaled(build: Build, x: ir.Value, factor: Tensor) -> ir.Value:
    """x [..., K] times a factor for each column."""
    values = as_ir(rounded(factor.float(), build.graph.dtype, "an input factor")).numpy()
    return _shared(
        build, x, values, lambda name: build.graph.op(AT, "Mul", x, _kept(build, name, values))
    )


def picked(build: Build, x: ir.Value, columns: Tensor) -> ir.Value:
    """Some columns of x [..., K], in an order of their own."""
    values = columns.numpy()
    return _shared(
        build,
        x,
        values,
        lambda name: build.graph.op(AT, "Gather", x, _kept(build, name, values), axis=-1),
    )


def _shared(
    build: Build,
    x: ir.Value,
    values: Array,
    make: Callable[[str], ir.Value],
) -> ir.Value:
    """Linears that do the same to the same input share what comes of it."""
    name = hashlib.sha256(values.tobytes() + str(values.dtype).encode()).hexdigest()[:16]
    return build.once(f"{x.name} {name}", lambda: make(f"{AT}/{name}"))


def _kept(build: Build, name: str, values: Array) -> ir.Value:
    tensor = ir.tensor(values)
    return build.graph.weight(name, tensor.dtype, values.shape, lambda: tensor)


def as_rounded(build: Build, inputs: InputQuantization, x: ir.Value) -> ir.Value:
    """x [..., K], with its factor, as the source rounds it, or as it is, with a note."""
    scheme = inputs.scheme
    if inputs.scale is not None:
        return static(build, x, float(inputs.scale), scheme)
    if scheme.type == "int" and scheme.granularity != "group" and scheme.outliers == "none":
        codes, steps = by_token(build, x, scheme)
        key = f"rounded {x.name} {scheme.describe()}"
        return build.once(key, lambda: build.graph.op(AT, "Mul", codes, steps))
    build.note(f"inputs that the source rounds at run time ({scheme.describe()}) stay as they are")
    return x


def static(build: Build, x: ir.Value, scale: float, scheme: ActivationScheme) -> ir.Value:
    """QuantizeLinear and DequantizeLinear with the one scale that calibration found.
    CheckpointError for one that fp16 cannot hold."""
    graph, build.rounds = build.graph, True
    dtype = ir.DataType.INT8 if scheme.type == "int" else ir.DataType.FLOAT8E4M3FN
    if scheme.type == "float":
        build.session[QDQ_OFF] = "1"
    scale_in(torch.tensor(scale), graph.dtype, f"input {x.name}")
    step = graph.number(scale)

    def make() -> ir.Value:
        codes = graph.op(AT, "QuantizeLinear", x, step, output_dtype=int(dtype))
        return graph.op(AT, "DequantizeLinear", codes, step)

    return build.once(f"static {x.name} {scale!r} {dtype}", make)


def by_token(build: Build, x: ir.Value, scheme: ActivationScheme) -> tuple[ir.Value, ir.Value]:
    """Codes [..., K], whole numbers in the graph's dtype, and what one is worth, [..., 1]."""
    build.rounds = True
    half = 1 << (scheme.bits - 1)
    key = f"by token {x.name} {scheme.bits}"
    return build.once(key, lambda: _by_token(build, x, (half - 0.5, -half, half - 1)))


def by_absmax(build: Build, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The same as bitsandbytes has it: the largest magnitude of a token lands on 127."""
    build.rounds = True
    return build.once(f"absmax {x.name}", lambda: _by_token(build, x, (127.0, -127, 127)))


def _by_token(build: Build, x: ir.Value, ends: tuple[float, int, int]) -> tuple[ir.Value, ir.Value]:
    """ends: code that the largest magnitude lands on, least and largest code."""
    graph, (steps, low, high) = build.graph, ends
    largest = graph.op(AT, "ReduceMax", graph.op(AT, "Abs", x), graph.ints(-1), keepdims=1)
    least = graph.number(float(np.finfo(graph.dtype.numpy()).tiny))
    step = graph.op(AT, "Max", graph.op(AT, "Div", largest, graph.number(steps)), least)
    codes = graph.op(AT, "Round", graph.op(AT, "Div", x, step))
    return graph.op(AT, "Clip", codes, graph.number(low), graph.number(high)), step
