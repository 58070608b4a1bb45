"""What a block computes behind attention: an MLP, or a mixture of them as a plain graph."""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from compress.arch.spec import BlockSpec, LinearSpec
from compress_exporters.onnx.graph.activations import ACTIVATIONS
from compress_exporters.onnx.graph.build import Build

Roles = Mapping[str, LinearSpec]


def mlp(build: Build, block: BlockSpec, x: ir.Value) -> ir.Value:
    """x: [B, S, hidden] -> what is added to the residual."""
    roles = {linear.role: linear for linear in block.linears if linear.expert is None}
    if "router" in roles:
        return _mixture(build, block, roles["router"], x)
    return expert(build, f"{block.prefix}.mlp", roles, x)


def expert(build: Build, at: str, roles: Roles, x: ir.Value) -> ir.Value:
    """One MLP. at: where its nodes stand."""
    graph, linear = build.graph, build.lowering.linear
    gate: ir.Value | None
    activation = ACTIVATIONS[build.how.activation]
    if "gate_up" in roles:
        half = roles["down"].shape[1]
        both = linear(build, roles["gate_up"], x)
        gate, up = graph.ops(at, "Split", 2, both, graph.ints(half, half), axis=-1)
    else:
        up = linear(build, roles["up"], x)
        gate = linear(build, roles["gate"], x) if build.how.gated else None
    if gate is None:
        middle = activation(graph, at, up)
    else:
        middle = graph.op(at, "Mul", activation(graph, at, gate), up)
    return linear(build, roles["down"], middle)


def experts_of(block: BlockSpec) -> list[dict[str, LinearSpec]]:
    """The linears of each expert, by role."""
    found: dict[int, dict[str, LinearSpec]] = {}
    for linear in block.linears:
        if linear.expert is not None:
            found.setdefault(linear.expert, {})[linear.role] = linear
    return [found[number] for number in sorted(found)]


def _mixture(build: Build, block: BlockSpec, router: LinearSpec, x: ir.Value) -> ir.Value:
    """Every expert computes every token, and those that were not chosen count nothing."""
    graph, at, experts = build.graph, f"{block.prefix}.mixture", experts_of(block)
    shares = graph.ops(
        at, "Split", len(experts), _shares(build, at, router, x), axis=-1, num_outputs=len(experts)
    )
    total: ir.Value | None = None
    for number, (roles, share) in enumerate(zip(experts, shares, strict=True)):
        out = expert(build, f"{at}.{number}", roles, x)
        out = graph.op(at, "Mul", out, share)
        total = out if total is None else graph.op(at, "Add", total, out)
    assert total is not None
    build.unfused["mixture of experts"] = "a plain graph: every expert computes every token"
    return total


def _shares(build: Build, at: str, router: LinearSpec, x: ir.Value) -> ir.Value:
    """What each expert counts for a token, [B, S, experts]; 0 where it was not chosen."""
    graph, how = build.graph, build.how
    logits = _wide(build, at, build.lowering.linear(build, router, x))
    all_shares = graph.op(at, "Softmax", logits, axis=-1)
    chosen, index = graph.ops(
        at, "TopK", 2, all_shares, graph.ints(how.experts_per_token), axis=-1, largest=1, sorted=1
    )
    if how.norm_topk:
        whole = graph.op(at, "ReduceSum", chosen, graph.ints(-1), keepdims=1)
        chosen = graph.op(at, "Div", chosen, whole)
    nothing = graph.op(at, "Mul", all_shares, graph.constant(np.array(0, np.float32)))
    shares = graph.op(at, "ScatterElements", nothing, index, chosen, axis=-1)
    if graph.dtype == ir.DataType.FLOAT:
        return shares
    return graph.op(at, "Cast", shares, to=int(graph.dtype))


def _wide(build: Build, at: str, x: ir.Value) -> ir.Value:
    if build.graph.dtype == ir.DataType.FLOAT:
        return x
    return build.graph.op(at, "Cast", x, to=int(ir.DataType.FLOAT))
