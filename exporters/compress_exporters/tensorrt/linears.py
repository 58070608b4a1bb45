"""Quantized linears as TensorRT takes them: codes [K, N] that go to DequantizeLinear directly."""

from collections.abc import Mapping
from types import MappingProxyType

import onnx_ir as ir
import torch
from torch import Tensor

from compress.arch.spec import LinearSpec
from compress.errors import CheckpointError
from compress.quant.fp4 import pack_fp4
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import InputQuantization, OutlierColumns, QuantizedTensor
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.codes import Coded, coded, require_scales, scale_in
from compress_exporters.onnx.graph.dense import as_ir, rounded
from compress_exporters.onnx.graph.integers import as_integers
from compress_exporters.onnx.graph.linear import Product, dense
from compress_exporters.onnx.graph.rounding import ordered, picked, scaled, static
from compress_exporters.tensorrt.blocks import Holding, holding


def codes(build: Build, spec: LinearSpec, x: ir.Value) -> ir.Value:
    found = coded(build, spec)
    weight = _weight(build, found)
    return build.graph.op(spec.name, "MatMul", _inputs(build, found, x), weight)


def outliers(build: Build, spec: LinearSpec, x: ir.Value) -> ir.Value:
    """Columns that calibration fixed have codes 0 and a product of their own."""
    kept = build.weights.outliers(spec.tensor)
    assert kept is not None, "calibration fixed columns"
    whole = codes(build, spec, x)
    if not len(kept.columns):
        return whole
    dtype = build.graph.dtype

    def read() -> ir.TensorProtocol:
        weight = _outliers(build.quantized(spec.tensor)).weight.t()
        return as_ir(rounded(weight, dtype, spec.tensor))

    shape = (len(kept.columns), spec.shape[0])
    weight = build.graph.weight(f"{spec.name}.outliers", dtype, shape, read)
    apart = build.graph.op(spec.name, "MatMul", picked(build, x, kept.columns), weight)
    return build.graph.op(spec.name, "Add", whole, apart)


LINEARS: Mapping[str, Product] = MappingProxyType(
    {"dense": dense, "codes": codes, "integers": codes, "outliers": outliers}
)


def require_numbers(build: Build) -> None:
    """CheckpointError for scales and codes that cannot be said, before anything is written. Codes
    are read of weights with scales below 0 only."""
    source = build.weights
    for linear in source.spec.all_linears():
        decoded = linear.role in ("embedding", "kv_b")
        weight = None if decoded else source.outlined(linear.tensor)
        if weight is None:
            continue
        if not weight.scheme.is_fp4:  # whose scales stay what they are
            require_scales(build, (linear,))
        if bool((weight.scale.float() < 0).any()):
            _turned(build.quantized(linear.tensor), linear.tensor)
    build.forget()


def _inputs(build: Build, linear: Coded, x: ir.Value) -> ir.Value:
    """x times its factor, rounded with a calibrated scale, its columns in the weight's order."""
    if linear.beside.input_factor is not None:
        x = scaled(build, x, linear.beside.input_factor)
    inputs = build.weights.activation(linear.spec.name)
    x = x if inputs is None else as_rounded(build, inputs, x)
    return ordered(build, x, linear.order)


def as_rounded(build: Build, inputs: InputQuantization, x: ir.Value) -> ir.Value:
    """x with its factor, rounded with a calibrated scale; any other as it is, with a note."""
    if inputs.scale is not None:
        return static(build, x, float(inputs.scale), inputs.scheme)
    build.note(
        f"inputs that the source rounds at run time ({inputs.scheme.describe()}) stay as they"
        " are: TensorRT rounds with calibrated scales only"
    )
    return x


def _weight(build: Build, linear: Coded) -> ir.Value:
    """[K, N] in the graph's dtype."""
    graph, at, negative = build.graph, linear.spec.name, _is_negative(build, linear)
    held = holding(linear, negative)
    _note(build, linear, held, negative)
    inputs = [_codes(build, linear, held)]
    if held.dtype == "FLOAT4E2M1":
        weight = graph.op(
            at, "DequantizeLinear", *inputs, _fp4_scales(build, linear), axis=0, block_size=16
        )
        fp32 = graph.dtype == ir.DataType.FLOAT
        return weight if fp32 else graph.op(at, "Cast", weight, to=int(graph.dtype))
    inputs.append(_scales(build, linear, held))
    if held.block:
        return graph.op(at, "DequantizeLinear", *inputs, axis=0, block_size=held.block)
    if linear.scheme.granularity == "tensor":
        return graph.op(at, "DequantizeLinear", *inputs)
    return graph.op(at, "DequantizeLinear", *inputs, axis=1)


def _is_negative(build: Build, linear: Coded) -> bool:
    """Whether a weight has scales below 0, which a search may have made."""
    if linear.scheme.type == "float":
        return False

    def look() -> bool:
        weight = build.weights.outlined(linear.spec.tensor)
        assert weight is not None, "the linear is quantized"
        return bool((weight.scale.float() < 0).any())

    return build.once(f"negative {linear.spec.name}", look)


def _note(build: Build, linear: Coded, held: Holding, negative: bool) -> None:
    scheme = linear.scheme
    width = {"INT4": 4, "INT8": 8}.get(held.dtype, scheme.bits)
    if width > scheme.bits:
        what = f"codes of {scheme.bits} bits in {width}-bit integers{_why(scheme, negative)}"
        build.widened.setdefault(what, set()).add(linear.spec.name)
    if held.block and held.block != scheme.group_size:
        what = f"groups of {scheme.group_size}" if scheme.group_size else "rows with one scale"
        build.note(f"{what} are blocks of {held.block} with equal scales")
    if held.block and scheme.granularity == "block":
        build.note("squares that share a scale are columns of blocks with equal scales")


def _why(scheme: QuantScheme, negative: bool) -> str:
    if scheme.bits > 4:
        return ""
    if not negative:
        return ", as no blocks of 64 fill their rows"
    return (
        ", as they have scales below 0 and TensorRT none; quantize with signs: positive, or with"
        " tensorrt in the recipe's export, to keep 4"
    )


def notes(build: Build) -> tuple[str, ...]:
    """All that was converted, and how many layers' codes lie in wider integers."""
    widened = (
        f"{len(layers)} layer{'s have' if len(layers) > 1 else ' has'} {what}"
        for what, layers in build.widened.items()
    )
    return (*build.notes, *widened)


def _codes(build: Build, linear: Coded, held: Holding) -> ir.Value:
    (n, k), dtype = linear.spec.shape, ir.DataType[held.dtype]

    def read() -> ir.TensorProtocol:
        q = build.quantized(linear.spec.tensor)
        values = _turned(q, linear.spec.tensor)
        if linear.order is not None:
            values = values.view(torch.uint8)[:, linear.order].view(values.dtype)
        return _stored(values.t().contiguous(), dtype)

    return build.graph.weight(f"{linear.spec.name}.weight", dtype, (k, n), read)


def _stored(values: Tensor, dtype: ir.DataType) -> ir.TensorProtocol:
    """Codes [K, N] as ONNX packs them."""
    if dtype == ir.DataType.FLOAT4E2M1:
        packed = pack_fp4(values.reshape(1, -1)).reshape(-1)
        return ir.PackedTensor(packed.numpy(), dtype, shape=tuple(values.shape))
    if dtype == ir.DataType.FLOAT8E4M3FN:
        return ir.Tensor(values.view(torch.uint8).numpy().view(dtype.numpy()), dtype)
    return as_integers(values, dtype)


def _turned(q: QuantizedTensor, tensor: str) -> Tensor:
    """Codes [N, K] for scales above 0; 0 where the weight is, also in columns kept apart."""
    values = q.codes.clone()
    plain = values.view(torch.uint8)  # torch indexes no E4M3
    if bool((q.scale.float() <= 0).any()):
        steps = q.steps().expand(q.shape)
        plain[steps == 0] = 0
        below = steps < 0
        floats = q.scheme.type == "float"
        if bool(below.any() if floats else (values[below] == -128).any()):
            raise CheckpointError(
                f"{tensor} has scales below 0, and TensorRT takes none; quantize the source model"
                " again"
            )
        if not floats:
            values[below] *= -1
    if q.outliers is not None:
        plain[:, q.outliers.columns] = 0
    return values


def _scales(build: Build, linear: Coded, held: Holding) -> ir.Value:
    """[K / block, N], [N] of whole rows, or a scalar, in the graph's dtype."""
    (n, k), scheme, dtype = linear.spec.shape, linear.scheme, build.graph.dtype
    shape: tuple[int, ...] = (k // held.block, n) if held.block else (n,)
    shape = () if scheme.granularity == "tensor" and not held.block else shape
    name = f"{linear.spec.name}.weight_scale"

    def read() -> ir.TensorProtocol:
        q = build.quantized(linear.spec.tensor)
        rows = scheme.rows_per_scale(n)
        cells = _positive(q.scale).repeat_interleave(rows, dim=0)[:n]  # [N, groups]
        if held.block:
            cells = cells.repeat_interleave(shape[0] // cells.shape[1], dim=1).t()
        values = cells[:1].reshape(()) if not shape else cells.reshape(shape)
        return as_ir(scale_in(values, dtype, name))

    return build.graph.weight(name, dtype, shape, read)


def _fp4_scales(build: Build, linear: Coded) -> ir.Value:
    """NVFP4's scales fp32 [K / 16, N]: E4M3 codes behind a DequantizeLinear of their own."""
    (n, k), at = linear.spec.shape, linear.spec.name
    shape, tensor = (k // 16, n), linear.spec.tensor

    def read() -> ir.TensorProtocol:
        scale = build.quantized(tensor).scale
        raw = scale.view(torch.uint8).clone()
        raw[scale.float() == 0] = ONE
        return _stored(raw.t().contiguous(), ir.DataType.FLOAT8E4M3FN)

    def whole() -> ir.TensorProtocol:
        q = build.quantized(tensor)
        if q.global_factor is not None:
            return as_ir(q.global_factor.float().reshape(()))
        assert q.global_scale is not None, "NVFP4 has one number for the weight"
        return as_ir(q.global_scale.float().reciprocal().reshape(()))

    codes = build.graph.weight(f"{at}.weight_scale", ir.DataType.FLOAT8E4M3FN, shape, read)
    one = build.graph.weight(f"{at}.weight_scale_2", ir.DataType.FLOAT, (), whole)
    return build.graph.op(at, "DequantizeLinear", codes, one)


ONE = 0x38  # 1.0 as E4M3


def _positive(scale: Tensor) -> Tensor:
    """Magnitudes fp32; 1 for a scale of 0, whose codes are 0."""
    size = scale.float().abs()
    return torch.where(size == 0, 1.0, size)


def _outliers(q: QuantizedTensor) -> OutlierColumns:
    assert q.outliers is not None, "calibration fixed columns"
    return q.outliers
