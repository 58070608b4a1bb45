"""Norms as ONNX Runtime's own operators, an addition before them included."""

import onnx_ir as ir

from compress_exporters.genai.product import CONTRIB
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.dense import stored
from compress_exporters.onnx.graph.norms import norm_weight


def norm(build: Build, path: str, x: ir.Value) -> ir.Value:
    """x [..., n] behind the norm at a path of the checkpoint, over the last dimension."""
    graph, how, scale = build.graph, build.how, norm_weight(build, path)
    if how.norm == "rms":
        # ONNX Runtime has it in ONNX's own domain, where ONNX knows nothing of it.
        return graph.op(
            path, "SimplifiedLayerNormalization", x, scale, axis=-1, epsilon=how.eps, stash_type=1
        )
    inputs = (x, scale, *_bias(build, path))
    return graph.op(path, "LayerNormalization", *inputs, axis=-1, epsilon=how.eps)


def add_norm(build: Build, path: str, x: ir.Value, y: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(x + y, the same behind the norm)."""
    how, scale = build.how, norm_weight(build, path)
    rms = how.norm == "rms"
    normed, mean, deviation, total = build.graph.ops(
        path,
        "SkipSimplifiedLayerNormalization" if rms else "SkipLayerNormalization",
        4,
        *(x, y, scale, *(() if rms else _bias(build, path))),
        domain=CONTRIB,
        epsilon=how.eps,
    )
    mean.name = deviation.name = ""  # outputs that are left out
    return total, normed


def _bias(build: Build, path: str) -> tuple[ir.Value, ...]:
    name = f"{path}.bias"
    return (stored(build, name),) if build.has(name) else ()
