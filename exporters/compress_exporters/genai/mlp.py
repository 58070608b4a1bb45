"""MLPs: a fused gate and up are two products, and the order of a product's inputs is folded into
the rows of the products before it."""

from collections.abc import Mapping

import onnx_ir as ir
import torch
from torch import Tensor

from compress.arch.spec import BlockSpec, LinearSpec
from compress_exporters.genai.coded import coded
from compress_exporters.genai.product import Stack, product
from compress_exporters.onnx.graph import mlp as plain
from compress_exporters.onnx.graph.activations import ACTIVATIONS
from compress_exporters.onnx.graph.build import Build


def mlp(build: Build, block: BlockSpec, x: ir.Value) -> ir.Value:
    """x: [B, S, hidden] -> what is added to the residual."""
    roles = {linear.role: linear for linear in block.linears if linear.expert is None}
    if "down" not in roles:
        return plain.mlp(build, block, x)
    graph, at, down = build.graph, f"{block.prefix}.mlp", roles["down"]
    how = coded(build, down)
    order = None if how is None else how.order
    middle = [product(build, stack, x) for stack in _stacks(build, roles, order)]
    middle[0] = ACTIVATIONS[build.how.activation](graph, at, middle[0])
    inner = graph.op(at, "Mul", *middle) if len(middle) == 2 else middle[0]
    return product(build, Stack(down.name, (down,), ordered=order is not None), inner)


def _stacks(build: Build, roles: Mapping[str, LinearSpec], order: Tensor | None) -> list[Stack]:
    """What is computed in front of the activation, rows in the order that down reads them."""
    if "gate_up" in roles:
        both, half = roles["gate_up"], roles["down"].shape[1]
        rows = torch.arange(half) if order is None else order
        parts = (("gate", rows), ("up", rows + half))
        return [Stack(f"{both.name}.{name}", (both,), some) for name, some in parts]
    names = ("gate", "up") if build.how.gated else ("up",)
    return [Stack(roles[name].name, (roles[name],), order) for name in names]
