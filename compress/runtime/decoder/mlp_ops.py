"""What a block computes behind attention, as ops of compiled code."""

from collections.abc import Iterator

import torch
from torch import Tensor

from compress.runtime.decoder.calls import choice_call, gate_call, gather_call
from compress.runtime.decoder.linear import Linear
from compress.runtime.decoder.linear_ops import Made, Ops, joint_ops, linear_ops
from compress.runtime.decoder.mlp import Mixture, Mlp
from compress.runtime.decoder.scratch import Scratch
from compress_kernels.cpu.experts import EXPERT_NAMES, Routed, experts_op
from compress_kernels.cpu.program import Given, Program


def linears_of(mlp: Mlp | Mixture) -> Iterator[Linear]:
    if isinstance(mlp, Mixture):
        yield mlp.router
    for each in mlp.experts if isinstance(mlp, Mixture) else (mlp,):
        yield from (*each.inner.linears, each.down)


def mlp_ops(mlp: Mlp | Mixture, x: Tensor, scratch: Scratch) -> Made:
    """x: [rows, hidden] -> the same shape."""
    made = _mlp(mlp, x, scratch) if isinstance(mlp, Mlp) else _mixture(mlp, x, scratch)
    return (yield from made)


def _mlp(mlp: Mlp, x: Tensor, scratch: Scratch) -> Made:
    """As Mlp."""
    width = mlp.inner.sizes[0]
    inner = scratch.of("inner", sum(mlp.inner.sizes))
    first, *up = yield from joint_ops(mlp.inner, x, inner, scratch)
    middle, out = scratch.of("middle", width), scratch.of("made", scratch.hidden)
    yield gate_call(first, up[0] if up else None, middle, mlp.function)
    yield from linear_ops(mlp.down, middle, out, scratch)
    return out


def _mixture(mixture: Mixture, x: Tensor, scratch: Scratch) -> Made:
    """As Mixture."""
    logits, chosen = scratch.of("router", len(mixture.experts)), mixture.chosen
    yield from linear_ops(mixture.router, x, logits, scratch)
    routed = Routed(
        shares=scratch.of("shares", chosen, dtype=torch.float32),
        index=torch.zeros(scratch.rows, chosen, dtype=torch.int64),
        made=scratch.of("made", scratch.hidden),
        parts=scratch.of("parts", chosen, scratch.hidden, dtype=torch.float32),
        out=scratch.of("mixed", scratch.hidden),
    )
    yield choice_call(logits, routed.shares, routed.index, mixture.normalised)
    programs = [
        Program.of(tuple(_expert(expert, x, scratch)), EXPERT_NAMES) for expert in mixture.experts
    ]
    yield experts_op(programs, routed)
    return routed.out


def _expert(expert: Mlp, x: Tensor, scratch: Scratch) -> Ops:
    """Of some rows of x, into scratch's "made"."""
    taken = scratch.of("taken", scratch.hidden)
    yield gather_call(x, Given("taken"), taken)
    yield from _mlp(expert, taken, scratch)
