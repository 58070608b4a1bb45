"""Linear layers: dense weights, transposed once where they are written."""

import onnx_ir as ir

from compress.arch.spec import LinearSpec
from compress_exporters.onnx.build import Build
from compress_exporters.onnx.dense import stored


def linear(build: Build, spec: LinearSpec, x: ir.Value) -> ir.Value:
    """x: [B, S, K] -> [B, S, N]."""
    return with_bias(build, spec, build.graph.op(spec.name, "MatMul", x, dense(build, spec)))


def dense(build: Build, spec: LinearSpec) -> ir.Value:
    """The weight [K, N], decoded where it is quantized."""
    n, k = spec.shape
    if spec.transposed:
        return stored(build, spec.tensor, shape=(k, n))
    return stored(build, spec.tensor, lambda x: x.t(), (k, n))


def with_bias(build: Build, spec: LinearSpec, out: ir.Value) -> ir.Value:
    """out with the linear's bias, where it has one."""
    name = f"{spec.name}.bias"
    return build.graph.op(spec.name, "Add", out, stored(build, name)) if build.has(name) else out
