"""In which type and blocks TensorRT holds a quantized weight, or why it does not."""

from dataclasses import dataclass

from compress.errors import CheckpointError
from compress.quant.scheme import FP4_GROUP, QuantScheme
from compress_exporters.onnx.graph.codes import Coded

# Columns that share a scale in TensorRT's blocks, the larger first.
SIZES = (128, 64)
NEAREST = "quantize with symmetric groups of 64 or 128 (W4A16), or one scale a row (W8A16, FP8)"


@dataclass(frozen=True, slots=True)
class Holding:
    """dtype: ONNX's name. block: columns that share a scale; 0 where whole rows or weights do."""

    dtype: str
    block: int


def holding(linear: Coded, negative: bool) -> Holding:
    """CheckpointError, with the nearest scheme, for what TensorRT has no type or block for.

    negative: whether scales are below 0. TensorRT takes none, and turned around, the least code of
    4 bits needs more of them.
    """
    scheme, (_, k) = linear.scheme, linear.spec.shape
    if linear.beside.zero is not None:
        raise _refused(linear, "has zero points, and TensorRT quantizes symmetrically only")
    if k % scheme.columns_per_scale(k):
        size = scheme.group_size
        raise _refused(linear, f"has {k} columns, which are no whole groups of {size}")
    if scheme.is_fp4:
        return Holding("FLOAT4E2M1", FP4_GROUP)
    if scheme.type == "float":
        return Holding("FLOAT8E4M3FN", _block(linear) if _blocked(scheme) else 0)
    if scheme.bits > 4 or negative:
        return Holding("INT8", _block(linear) if _blocked(scheme) else 0)
    if _blocked(scheme):
        return Holding("INT4", _block(linear))
    # Rows of 4-bit codes with one scale are blocks with equal ones, if blocks fill them.
    fitting = next((size for size in SIZES if k % size == 0), None)
    return Holding("INT8", 0) if fitting is None else Holding("INT4", fitting)


def _blocked(scheme: QuantScheme) -> bool:
    return scheme.granularity in ("group", "block")


def _block(linear: Coded) -> int:
    size = next((size for size in SIZES if linear.scheme.group_size % size == 0), None)
    if size is None:
        have = linear.scheme.group_size
        raise _refused(linear, f"has groups of {have}, and TensorRT's blocks have 64 or 128")
    return size


def _refused(linear: Coded, why: str) -> CheckpointError:
    return CheckpointError(
        f"{linear.spec.tensor} ({linear.scheme.describe()}) {why}; {NEAREST}, or export --to onnx"
    )
