"""Products with one weight or with several that read the same inputs: one MatMulNBits each."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
import torch
from torch import Tensor

from compress.arch.spec import LinearSpec
from compress_exporters.decoded import decoded
from compress_exporters.genai.coded import MatMulCodes, coded
from compress_exporters.genai.nbits import Blocks, blocks
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.codes import scale_in
from compress_exporters.onnx.graph.dense import as_ir, rounded

CONTRIB = "com.microsoft"


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Weights one below the other, which are one matrix.

    name: of its tensors. rows: int64, which of all rows comes first, second and so on, and which
    do not; None as they lie. ordered: the inputs are in act-order already.
    """

    name: str
    linears: Sequence[LinearSpec]
    rows: Tensor | None = None
    ordered: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows = sum(linear.shape[0] for linear in self.linears)
        return rows if self.rows is None else len(self.rows), self.linears[0].shape[1]

    def turned(self, value: Tensor) -> Tensor:
        """Rows of all weights, in order."""
        return value if self.rows is None else value[self.rows]


def can_stack(build: Build, linears: Sequence[LinearSpec]) -> bool:
    """Whether weights that read the same inputs can be one matrix."""
    first, *rest = (coded(build, linear) for linear in linears)
    if first is None:
        return all(other is None for other in rest)
    return all(other is not None and first.is_like(other) for other in rest)


def linear(build: Build, spec: LinearSpec, x: ir.Value) -> ir.Value:
    """x: [B, S, K] -> [B, S, N]."""
    return product(build, Stack(spec.name, (spec,)), x)


def product(build: Build, stack: Stack, x: ir.Value) -> ir.Value:
    """x: [B, S, K] -> [B, S, rows of the stack], biases added."""
    how, bias = coded(build, stack.linears[0]), _bias(build, stack)
    if how is None:
        out = build.graph.op(stack.name, "MatMul", x, _dense(build, stack))
        return out if bias is None else build.graph.op(stack.name, "Add", out, bias)
    if how.factor is not None:
        factor = build.graph.constant(how.factor.to(_torch(build)).numpy())
        x = build.graph.op(stack.name, "Mul", x, factor)
    inner = x if how.order is None or stack.ordered else _in_order(build, stack.name, x, how.order)
    codes, scales, zeros = initializers(build, stack, how)
    out = multiplied(build, stack, how, (inner, codes, scales, zeros, bias))
    return out if how.columns is None else _with_outliers(build, stack, how.columns, x, out)


def multiplied(
    build: Build,
    stack: Stack,
    how: MatMulCodes,
    inputs: tuple[ir.Value, ir.Value, ir.Value, ir.Value | None, ir.Value | None],
) -> ir.Value:
    """inputs: x, codes [N, blocks, bytes], scales, zeros, bias."""
    x, codes, scales, zeros, bias = inputs
    given: list[ir.Value | None] = [x, codes, scales, zeros, None, bias]
    while given[-1] is None:
        given.pop()
    n, k = stack.shape
    return build.graph.op(
        stack.name,
        "MatMulNBits",
        *given,
        domain=CONTRIB,
        N=n,
        K=k,
        bits=how.layout.bits,
        block_size=how.layout.size,
        accuracy_level=build.options.accuracy_level,
    )


def _in_order(build: Build, at: str, x: ir.Value, order: Tensor) -> ir.Value:
    """Columns of x as the codes have them; linears that read alike share it."""
    key = hashlib.sha256(order.numpy().tobytes()).hexdigest()
    places = build.graph.constant(order.numpy())
    return build.once(
        f"{x.name} in order {key}", lambda: build.graph.op(at, "Gather", x, places, axis=-1)
    )


@dataclass(slots=True, eq=False)
class _Reading:
    """Blocks of a stack, read once for its tensors, as codes are written first: scales and zero
    points are kept until they are, codes never."""

    make: Callable[[], Blocks]
    left: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str) -> Tensor:
        if name not in self.left:
            made = self.make()
            small = {"scales": made.scales, "zeros": made.zeros}
            self.left = {key: value for key, value in small.items() if value is not None}
            if name == "codes":
                return made.codes
        return self.left.pop(name)


def initializers(
    build: Build, stack: Stack, how: MatMulCodes, *, flat: bool = False
) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """Codes [N, blocks, bytes] or, flat, [N, blocks * bytes]; scales [N, blocks]; zero points."""
    graph, (n, k), form = build.graph, stack.shape, how.layout
    reading = _Reading(lambda: _blocks(build, stack, how))
    count, width = form.count(k), form.width(k)
    shape = (n, width) if flat else (n, count, width // count)

    def weight(name: str, dtype: ir.DataType, shape: Sequence[int]) -> ir.Value:
        def read() -> ir.TensorProtocol:
            value = reading.take(name)
            value = scale_in(value, dtype, stack.name) if name == "scales" else value
            return as_ir(value.reshape(*shape))

        return graph.weight(f"{stack.name}.{name}", dtype, shape, read)

    codes = weight("codes", ir.DataType.UINT8, shape)
    scales = weight("scales", graph.dtype, (n, count))
    if not form.zeros:
        return codes, scales, None
    return codes, scales, weight("zeros", ir.DataType.UINT8, (n, form.zeros_width(k)))


def _blocks(build: Build, stack: Stack, how: MatMulCodes) -> Blocks:
    parts = []
    for linear in stack.linears:
        weight = build.weights.quantized(linear.tensor)
        assert weight is not None
        parts.append(blocks(weight, how.layout, how.order))
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return Blocks(
        stack.turned(torch.cat([part.codes for part in parts])),
        stack.turned(torch.cat([part.scales for part in parts])),
        stack.turned(torch.cat(zeros)) if zeros else None,
    )


def _dense(build: Build, stack: Stack) -> ir.Value:
    """[K, N], in the graph's dtype."""
    n, k = stack.shape

    def read() -> ir.TensorProtocol:
        parts = [_rows(build, linear) for linear in stack.linears]
        # Transposed before it is widened, which takes less memory than after.
        turned = stack.turned(parts.pop() if len(parts) == 1 else torch.cat(parts)).t().contiguous()
        return as_ir(rounded(turned, build.graph.dtype, stack.name))

    return build.graph.weight(f"{stack.name}.weight", build.graph.dtype, (k, n), read)


def _rows(build: Build, linear: LinearSpec) -> Tensor:
    """A dense weight [N, K]."""
    value = decoded(build.weights, linear.tensor)
    return value.t() if linear.transposed else value


def _bias(build: Build, stack: Stack) -> ir.Value | None:
    names = [f"{linear.name}.bias" for linear in stack.linears]
    if not any(map(build.has, names)):
        return None

    def read() -> ir.TensorProtocol:
        parts = [
            decoded(build.weights, name).float()
            if build.has(name)
            else torch.zeros(linear.shape[0])
            for name, linear in zip(names, stack.linears, strict=True)
        ]
        return as_ir(rounded(stack.turned(torch.cat(parts)), build.graph.dtype, stack.name))

    return build.graph.weight(f"{stack.name}.bias", build.graph.dtype, (stack.shape[0],), read)


def _with_outliers(
    build: Build, stack: Stack, columns: Tensor, x: ir.Value, out: ir.Value
) -> ir.Value:
    """out with what the columns add that are kept dense."""
    graph, at = build.graph, f"{stack.name}.outliers"

    def read() -> ir.TensorProtocol:
        parts = []
        for linear in stack.linears:
            weight = build.weights.quantized(linear.tensor)
            assert weight is not None
            assert weight.outliers is not None
            parts.append(weight.outliers.weight.float())
        return as_ir(rounded(stack.turned(torch.cat(parts)).t(), graph.dtype, stack.name))

    shape = (columns.numel(), stack.shape[0])
    weight = graph.weight(f"{at}.weight", graph.dtype, shape, read)
    some = graph.op(at, "Gather", x, graph.constant(columns.numpy()), axis=-1)
    return graph.op(at, "Add", out, graph.op(at, "MatMul", some, weight))


def _torch(build: Build) -> torch.dtype:
    return torch.float32 if build.graph.dtype == ir.DataType.FLOAT else torch.float16
