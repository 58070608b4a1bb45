"""Weights as they are, or decoded, in the graph's dtype."""

from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress_exporters.decoded import decoded
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.linked import linked, wide

TORCH = {ir.DataType.FLOAT: torch.float32, ir.DataType.FLOAT16: torch.float16}


def stored(build: Build, tensor: str, shape: Sequence[int] | None = None) -> ir.Value:
    """A tensor of the checkpoint, where it lies if that is asked for and can be.

    shape: None for what the checkpoint says.
    """
    there = linked(build, tensor)
    if there is None:
        return written(build, tensor, shape=shape)
    return wide(build, tensor.removesuffix(".weight"), there, tensor)


def turned(build: Build, at: str, tensor: str) -> ir.Value | None:
    """The transpose of a matrix that stays where it is; None for one that does not."""
    there = linked(build, tensor)
    if there is None:
        return None
    # Turned while it is narrow, which takes less memory when ONNX Runtime does it.
    return wide(build, at, build.graph.op(at, "Transpose", there, perm=[1, 0]), tensor)


def written(
    build: Build,
    tensor: str,
    turn: Callable[[Tensor], Tensor] = lambda x: x,
    shape: Sequence[int] | None = None,
    name: str | None = None,
) -> ir.Value:
    """The initializer of a tensor of the checkpoint.

    turn: what is done with it, in its own dtype, before it is rounded. shape: behind that; None for
    what the checkpoint says. name: None for the tensor's own.
    """
    dtype = build.graph.dtype
    shape = build.weights.checkpoint.tensors[tensor].shape if shape is None else shape

    def read() -> ir.TensorProtocol:
        # Turned while it is narrow: of the wide form there is one copy then, not two.
        narrow = turn(decoded(build.weights, tensor)).contiguous()
        return as_ir(rounded(narrow, dtype, tensor))

    return build.graph.weight(name or tensor, dtype, shape, read)


def rounded(value: Tensor, dtype: ir.DataType, tensor: str) -> Tensor:
    """In the graph's dtype; CheckpointError where fp16 has no such number."""
    result = value.to(TORCH[dtype])
    if dtype == ir.DataType.FLOAT16 and not all(x.isfinite() for x in result.aminmax()):
        most = max(abs(x.item()) for x in value.aminmax())
        raise CheckpointError(
            f"tensor {tensor!r} has a number of size {most:.6g}, and fp16 ends at 65504; export"
            " with dtype fp32"
        )
    return result


def as_ir(value: Tensor) -> ir.TensorProtocol:
    return ir.Tensor(value.contiguous().numpy())
