"""Quantized weights [K, N] as codes and scales behind DequantizeLinear: the numbers of
QuantizedTensor.dequantize(), in whatever blocks."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import onnx_ir as ir
import torch
from torch import Tensor

from compress.arch.spec import LinearSpec
from compress.errors import CheckpointError
from compress.formats.stored import Beside
from compress.formats.weights import Weights
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import QuantizedTensor
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.dense import TORCH, as_ir
from compress_exporters.onnx.graph.integers import SIGNED, UNSIGNED, as_integers, width_of


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """A quantized linear, of which no code is read yet.

    beside: its zero points are on the device meta. order: int64 [K], the columns by group, where
    that is not how they lie.
    """

    spec: LinearSpec
    scheme: QuantScheme
    beside: Beside
    order: Tensor | None

    @classmethod
    def of(cls, source: Weights, spec: LinearSpec) -> "Coded":
        scheme, beside = source.scheme(spec.name), source.beside(spec.name)
        assert scheme is not None, "the linear is quantized"
        order = None if beside.g_idx is None else beside.g_idx.long().argsort(stable=True)
        # Numbers of all weights' zero points would add up; only whether there are some is asked.
        zero = None if beside.zero is None else beside.zero.to("meta")
        return cls(spec, scheme, replace(beside, zero=zero), order)

    @property
    def grouped(self) -> bool:
        """Whether a row has several scales."""
        return self.scheme.groups(self.spec.shape[1]) > 1

    @property
    def block(self) -> int:
        """Columns that share a scale in the graph, where rows have several."""
        columns = self.spec.shape[1]
        return block_of(self.scheme.columns_per_scale(columns), columns)


def coded(build: Build, spec: LinearSpec) -> Coded:
    """What lies beside the codes of a quantized linear, read once."""
    return build.once(f"coded {spec.name}", lambda: Coded.of(build.weights, spec))


# Blocks that ONNX Runtime multiplies with as they are; others it decodes at every step.
MULTIPLIED = (16, 32, 64, 128, 256)


def block_of(group: int, columns: int) -> int:
    """Columns of a block: the largest power of two, up to 256, that divides a group and the row.

    So ONNX Runtime multiplies with groups of 48, too. OpenVINO 2026.4 opens no blocks that do not
    divide the row, and where tokens are few computes others wrong: of 4 bits most above 32 that are
    no multiple of it, of 8 bits those that are no multiple of 4. An odd group stays one block.
    """
    both = math.gcd(group, columns)
    part = min(both & -both, MULTIPLIED[-1])
    return part if part > 1 else group


def dequantized(build: Build, linear: Coded, columns: Tensor | None = None) -> ir.Value:
    """The weight [K, N] in the graph's dtype, without its input factor.

    columns: those that are wanted, in this order, instead of linear.order.
    """
    columns = linear.order if columns is None else columns
    scheme, (n, k), at = linear.scheme, linear.spec.shape, linear.spec.name
    k = k if columns is None else len(columns)
    dtype = _dtype(build, linear)
    inputs = [
        _initializer(build, linear, "weight", dtype, (k, n), lambda q: _codes(q, columns, dtype)),
        scales(build, linear),
    ]
    if linear.beside.zero is not None:
        shape = tuple(inputs[1].shape.numpy() if inputs[1].shape is not None else ())
        inputs.append(
            _initializer(
                build,
                linear,
                "weight_zero_point",
                dtype,
                shape,
                lambda q: as_integers(_laid_out(linear, q, _zero(q)), dtype),
            )
        )
    if scheme.type == "float" and not scheme.is_fp4:
        build.unfused["weights of 8-bit floats"] = "ONNX Runtime decodes them at every step"
    if linear.grouped:
        if linear.block not in MULTIPLIED:
            group = scheme.columns_per_scale(linear.spec.shape[1])
            build.unfused[f"groups of {group}"] = "ONNX Runtime decodes them at every step"
        return build.graph.op(at, "DequantizeLinear", *inputs, axis=0, block_size=linear.block)
    if scheme.granularity == "tensor":
        return build.graph.op(at, "DequantizeLinear", *inputs)
    return build.graph.op(at, "DequantizeLinear", *inputs, axis=1)


def scales(build: Build, linear: Coded) -> ir.Value:
    """What a code is worth, in the graph's dtype: [blocks, N], [N] of whole rows, or a scalar."""
    (n, k), scheme, dtype = linear.spec.shape, linear.scheme, build.graph.dtype
    shape: tuple[int, ...] = (-(-k // linear.block), n) if linear.grouped else (n,)
    shape = () if scheme.granularity == "tensor" else shape

    def read(q: QuantizedTensor) -> ir.TensorProtocol:
        name = f"{linear.spec.name}.weight_scale"
        return as_ir(scale_in(_laid_out(linear, q, _step(q)), dtype, name))

    return _initializer(build, linear, "weight_scale", dtype, shape, read)


def _dtype(build: Build, linear: Coded) -> ir.DataType:
    scheme = linear.scheme
    if scheme.is_fp4:
        build.note(
            "4-bit floats are 8-bit integers of twice their value, which are the same numbers"
        )
        return ir.DataType.INT8
    if scheme.type == "float":
        return ir.DataType.FLOAT8E4M3FN
    width = width_of(scheme.bits)
    if width > scheme.bits:
        build.note(f"codes of {scheme.bits} bits are in {width}-bit integers, unchanged")
    return (SIGNED if linear.beside.zero is None else UNSIGNED)[width]


def _initializer(
    build: Build,
    linear: Coded,
    part: str,
    dtype: ir.DataType,
    shape: tuple[int, ...],
    read: Callable[[QuantizedTensor], ir.TensorProtocol],
) -> ir.Value:
    name = f"{linear.spec.name}.{part}"
    return build.graph.weight(name, dtype, shape, lambda: read(build.quantized(linear.spec.tensor)))


def _codes(q: QuantizedTensor, columns: Tensor | None, dtype: ir.DataType) -> ir.TensorProtocol:
    codes = q.codes if columns is None else _columns(q.codes, columns)
    turned = codes.t()
    if q.scheme.is_fp4:
        return as_integers((turned.float() * 2).to(torch.int8), dtype)
    if q.scheme.type == "float":
        return ir.Tensor(turned.contiguous().view(torch.uint8).numpy().view(dtype.numpy()), dtype)
    return as_integers(turned, dtype)


def _columns(codes: Tensor, columns: Tensor) -> Tensor:
    """Some columns, also of E4M3, which torch does not index."""
    return codes.view(torch.uint8)[:, columns].view(codes.dtype)


def _step(q: QuantizedTensor) -> Tensor:
    """Scales fp32, as the scheme shapes them, global ones included."""
    scale = q.scale.float()
    if q.global_scale is not None:
        scale = scale / q.global_scale
    if q.global_factor is not None:
        scale = scale * q.global_factor
    return scale / 2 if q.scheme.is_fp4 else scale


def _zero(q: QuantizedTensor) -> Tensor:
    assert q.zero is not None
    return q.zero


def _laid_out(linear: Coded, q: QuantizedTensor, values: Tensor) -> Tensor:
    """Scales or zero points as DequantizeLinear reads them."""
    n, k = q.shape
    if q.scheme.granularity == "tensor":
        return values.reshape(())
    if q.scheme.granularity == "block":
        values = values.repeat_interleave(q.scheme.rows_per_scale(n), dim=0)[:n]
    if not linear.grouped:
        return values.reshape(n)
    first = torch.arange(0, k, linear.block) // q.scheme.columns_per_scale(k)
    return values.t()[first]


# Linears of latent attention: those that make latents have fp32 scales in any graph, and what heads
# make of them is decoded.
APART = ("q_a", "kv_a", "kv_b")


def require_scales(build: Build, linears: Iterable[LinearSpec]) -> None:
    """CheckpointError for a scale that fp16 cannot hold, before anything is written; no codes are
    read."""
    source, dtype = build.weights, build.graph.dtype
    if dtype == ir.DataType.FLOAT:
        return
    for linear in linears:
        weight = None if linear.role in APART else source.outlined(linear.tensor)
        if weight is not None:
            scale_in(_step(weight), dtype, f"{linear.name}.weight_scale")


def scale_in(scale: Tensor, dtype: ir.DataType, name: str) -> Tensor:
    """fp32 scales in the graph's dtype; CheckpointError where fp16 would change one by more than
    its precision."""
    result = scale.to(TORCH[dtype])
    change = (result.float() - scale).abs() > scale.abs() / 1024
    if bool(change.any()):
        lost = scale[change].flatten()[0].item()
        raise CheckpointError(
            f"{name} has a scale of {lost:.3g}, which fp16 cannot hold; export with dtype fp32"
        )
    return result
