"""MLPs, with the order of a product's inputs folded into the rows of the products before it."""

import onnx_ir as ir

from compress.arch.spec import BlockSpec
from compress_exporters.genai.coded import coded
from compress_exporters.genai.product import Stack, product
from compress_exporters.onnx import mlp as plain
from compress_exporters.onnx.activations import ACTIVATIONS
from compress_exporters.onnx.build import Build


def mlp(build: Build, block: BlockSpec, x: ir.Value) -> ir.Value:
    """x: [B, S, hidden] -> what is added to the residual."""
    roles = {linear.role: linear for linear in block.linears if linear.expert is None}
    order = None if "down" not in roles else getattr(coded(build, roles["down"]), "order", None)
    if order is None or "gate_up" in roles:
        return plain.mlp(build, block, x)
    graph, at = build.graph, f"{block.prefix}.mlp"
    names = ("gate", "up") if build.how.gated else ("up",)
    middle = [product(build, Stack(roles[n].name, (roles[n],), order), x) for n in names]
    middle[0] = ACTIVATIONS[build.how.activation](graph, at, middle[0])
    inner = graph.op(at, "Mul", *middle) if len(middle) == 2 else middle[0]
    return product(build, Stack(roles["down"].name, (roles["down"],), ordered=True), inner)
