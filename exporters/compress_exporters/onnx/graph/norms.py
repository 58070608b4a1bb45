"""Norms of one operator each."""

import onnx_ir as ir

from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.dense import stored, written
from compress_exporters.onnx.graph.linked import copied


def norm(build: Build, path: str, x: ir.Value, eps: float | None = None) -> ir.Value:
    """x [..., n] behind the norm at a path of the checkpoint, over the last dimension.

    eps: the decoder's where it is None.
    """
    how, graph = build.how, build.graph
    eps = how.eps if eps is None else eps
    scale = norm_weight(build, path)
    if how.norm == "rms":
        return graph.op(path, "RMSNormalization", x, scale, axis=-1, epsilon=eps)
    bias = stored(build, f"{path}.bias") if build.has(f"{path}.bias") else None
    inputs = (x, scale) if bias is None else (x, scale, bias)
    return graph.op(path, "LayerNormalization", *inputs, axis=-1, epsilon=eps)


def norm_weight(build: Build, path: str) -> ir.Value:
    """A norm's weight with all that is added to it."""
    offset = build.how.norm_offset
    if not offset:
        return stored(build, f"{path}.weight")
    copied(build, f"{path}.weight", "what the norm adds to them is in them")
    return written(build, f"{path}.weight", lambda x: x.float() + offset)


def add_norm(build: Build, path: str, x: ir.Value, y: ir.Value) -> tuple[ir.Value, ir.Value]:
    total = build.graph.op(path, "Add", x, y)
    return total, build.lowering.norm(build, path, total)
