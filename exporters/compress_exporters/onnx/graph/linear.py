"""Linear layers: how the weight and the inputs of each kind are said.

A target with operators of its own replaces rows of LINEARS and makes its `linear` of that table.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import onnx_ir as ir
import torch

from compress.arch.spec import LinearSpec
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.codes import Coded, coded, dequantized, scales
from compress_exporters.onnx.graph.dense import as_ir, rounded, stored, turned, written
from compress_exporters.onnx.graph.integers import as_integers
from compress_exporters.onnx.graph.rounding import by_absmax, by_token, picked, prepared

# (build, linear, x [B, S, K]) -> [B, S, N], the bias left out.
Product = Callable[[Build, LinearSpec, ir.Value], ir.Value]


def kind_of(build: Build, spec: LinearSpec) -> str:
    """The row of a table of LINEARS that a linear needs.

    "dense": not quantized. "codes": codes of any kind, inputs as they
    are, with a fixed scale, or rounded a token at a time. "integers": 8-bit codes, symmetric, one
    scale a row or a weight, inputs rounded a token at a time: a product of integers. "outliers":
    the same beside columns in 16 bit that calibration fixed.
    """
    if not build.weights.is_quantized(spec.name):
        return "dense"
    found = coded(build, spec)
    inputs = found.scheme.activation
    if inputs is not None and inputs.outliers == "calibrated":
        return "outliers"
    return "integers" if _multiplies_integers(found) else "codes"


def _multiplies_integers(found: Coded) -> bool:
    scheme, inputs = found.scheme, found.scheme.activation
    rows = scheme.granularity in ("channel", "tensor") and found.beside.zero is None
    if inputs is None or not rows or scheme.type != "int" or inputs.type != "int":
        return False
    by_row = inputs.granularity != "group" and inputs.outliers == "none"
    return scheme.bits == 8 and inputs.bits == 8 and inputs.dynamic and by_row


def dense(build: Build, spec: LinearSpec, x: ir.Value) -> ir.Value:
    return build.graph.op(spec.name, "MatMul", x, dense_weight(build, spec))


def dense_weight(build: Build, spec: LinearSpec) -> ir.Value:
    """The weight [K, N], decoded where it is quantized."""
    n, k = spec.shape
    if spec.transposed:
        return stored(build, spec.tensor, (k, n))
    there = turned(build, spec.name, spec.tensor)
    return written(build, spec.tensor, lambda x: x.t(), (k, n)) if there is None else there


def codes(build: Build, spec: LinearSpec, x: ir.Value) -> ir.Value:
    found = coded(build, spec)
    weight = dequantized(build, found)
    return build.graph.op(spec.name, "MatMul", prepared(build, found, x), weight)


def integers(build: Build, spec: LinearSpec, x: ir.Value) -> ir.Value:
    found = coded(build, spec)
    inputs = found.scheme.activation
    assert inputs is not None
    weight = _int8(build, found, None)
    return _integer_product(build, found, by_token(build, x, inputs), weight)


def outliers(build: Build, spec: LinearSpec, x: ir.Value) -> ir.Value:
    source, found = build.weights, coded(build, spec)
    kept = source.outliers(spec.tensor)
    assert kept is not None, "calibration fixed columns"
    if not len(kept.columns):
        return _beside(build, found, x, None)
    others = torch.ones(spec.shape[1], dtype=torch.bool)
    others[kept.columns] = False
    rest, dtype = others.nonzero().flatten(), build.graph.dtype

    def read() -> ir.TensorProtocol:
        again = source.outliers(spec.tensor)
        assert again is not None
        return as_ir(rounded(again.weight.t(), dtype, spec.tensor))

    shape = (len(kept.columns), spec.shape[0])
    weight = build.graph.weight(f"{spec.name}.outliers", dtype, shape, read)
    apart = build.graph.op(spec.name, "MatMul", picked(build, x, kept.columns), weight)
    if not len(rest):  # ONNX Runtime multiplies no integers of width 0
        return apart
    return build.graph.op(spec.name, "Add", _beside(build, found, x, rest), apart)


def _beside(build: Build, found: Coded, x: ir.Value, rest: torch.Tensor | None) -> ir.Value:
    """The product of the columns that calibration left in codes; None where it left all."""
    some = x if rest is None else picked(build, x, rest)
    return _integer_product(build, found, by_absmax(build, some), _int8(build, found, rest))


def _int8(build: Build, found: Coded, columns: torch.Tensor | None) -> ir.Value:
    """Codes int8 [K, N], of some columns where they are given."""
    n, k = found.spec.shape

    def read() -> ir.TensorProtocol:
        values = build.quantized(found.spec.tensor).codes
        values = values if columns is None else values[:, columns]
        return as_integers(values.t(), ir.DataType.INT8)

    shape = (k if columns is None else len(columns), n)
    return build.graph.weight(f"{found.spec.name}.weight", ir.DataType.INT8, shape, read)


def _integer_product(
    build: Build, found: Coded, inputs: tuple[ir.Value, ir.Value], weight: ir.Value
) -> ir.Value:
    graph, at, (whole, step) = build.graph, found.spec.name, inputs
    narrow = build.once(
        f"int8 {whole.name}", lambda: graph.op("inputs", "Cast", whole, to=int(ir.DataType.INT8))
    )
    product = graph.op(at, "MatMulInteger", narrow, weight)
    product = graph.op(at, "Cast", product, to=int(graph.dtype))
    product = graph.op(at, "Mul", product, step)
    return graph.op(at, "Mul", product, scales(build, found))


LINEARS: Mapping[str, Product] = MappingProxyType(
    {"dense": dense, "codes": codes, "integers": integers, "outliers": outliers}
)


def linear_by(table: Mapping[str, Product]) -> Product:
    """The `linear` of a Lowering: the table's row for each, and the bias."""

    def linear(build: Build, spec: LinearSpec, x: ir.Value) -> ir.Value:
        return with_bias(build, spec, table[kind_of(build, spec)](build, spec, x))

    return linear


def with_bias(build: Build, spec: LinearSpec, out: ir.Value) -> ir.Value:
    """out with the linear's bias, where it has one."""
    name = f"{spec.name}.bias"
    return build.graph.op(spec.name, "Add", out, stored(build, name)) if build.has(name) else out
