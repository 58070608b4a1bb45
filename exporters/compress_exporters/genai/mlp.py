"""MLPs: gate and up are one product, and the order of a product's inputs is folded into the rows of
the products before it."""

from collections.abc import Mapping

import onnx_ir as ir
import torch
from torch import Tensor

from compress.arch.spec import BlockSpec, LinearSpec
from compress_exporters.genai.coded import coded
from compress_exporters.genai.product import Stack, can_stack, product
from compress_exporters.onnx import mlp as plain
from compress_exporters.onnx.activations import ACTIVATIONS
from compress_exporters.onnx.build import Build


def mlp(build: Build, block: BlockSpec, x: ir.Value) -> ir.Value:
    """x: [B, S, hidden] -> what is added to the residual."""
    roles = {linear.role: linear for linear in block.linears if linear.expert is None}
    if "down" not in roles:
        return plain.mlp(build, block, x)
    graph, at, down = build.graph, f"{block.prefix}.mlp", roles["down"]
    how = coded(build, down)
    order = None if how is None else how.order
    if "gate_up" in roles or build.how.gated:
        gate, up = _gate_and_up(build, at, roles, order, x)
        inner = graph.op(at, "Mul", ACTIVATIONS[build.how.activation](graph, at, gate), up)
    else:
        alone = product(build, Stack(roles["up"].name, (roles["up"],), order), x)
        inner = ACTIVATIONS[build.how.activation](graph, at, alone)
    return product(build, Stack(down.name, (down,), ordered=order is not None), inner)


def _gate_and_up(
    build: Build, at: str, roles: Mapping[str, LinearSpec], order: Tensor | None, x: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """x: [B, S, hidden] -> both [B, S, columns of down], in the order that down reads them.

    The input of one product is rounded once, of two twice: a token of the 400M shape in 4 bits took
    11 % longer with two (`python -m benchmarks.export.gate_up`).
    """
    graph, half = build.graph, roles["down"].shape[1]
    rows = None if order is None else torch.cat([order, order + half])
    if "gate_up" in roles:
        stack = Stack(roles["gate_up"].name, (roles["gate_up"],), rows)
    elif can_stack(build, both := (roles["gate"], roles["up"])):
        stack = Stack(f"{at}.gate_up", both, rows)
    else:
        build.unfused["packed gate/up"] = "their weights are stored in different ways"
        gate, up = (product(build, Stack(one.name, (one,), order), x) for one in both)
        return gate, up
    fused = product(build, stack, x)
    gate, up = graph.ops(at, "Split", 2, fused, graph.ints(half, half), axis=-1)
    return gate, up
