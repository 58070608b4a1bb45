"""What linears compute, as ops of compiled code."""

from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from compress.runtime.decoder.calls import (
    ROWS,
    heads_call,
    linear_call,
    round_call,
    rounding_before,
)
from compress.runtime.decoder.heads import HeadLinears
from compress.runtime.decoder.linear import Joint, Linear
from compress.runtime.decoder.scratch import Scratch
from compress_kernels.cpu.program import CompiledOp, Given
from compress_kernels.heads import HeadPanels
from compress_kernels.rounding import CodeRounding

Ops = Iterator[CompiledOp]
Made = Generator[CompiledOp, None, Tensor]  # ops, and where they leave their result
Parts = Generator[CompiledOp, None, tuple[Tensor, ...]]


def linear_ops(linear: Linear, x: Tensor, out: Tensor, scratch: Scratch, rows: Given = ROWS) -> Ops:
    """As Linear; x: [rows, K], out: [rows, N], rows apart."""
    seen = yield from _rounded(x, rounding_before(linear), scratch, rows)
    yield linear_call(linear, seen, out, rows)


def joint_ops(joint: Joint, x: Tensor, out: Tensor, scratch: Scratch) -> Parts:
    """All parts side by side in `out`, [rows, sum of sizes]; views of it. What they round alike is
    rounded once."""
    parts = torch.split(out, list(joint.sizes), dim=1)
    seen, last = x, None
    for linear, part in zip(
        joint.linears, parts if len(joint.linears) > 1 else (out,), strict=True
    ):
        rounding = rounding_before(linear)
        if rounding != last:
            seen = yield from _rounded(x, rounding, scratch)
        last = rounding
        yield linear_call(linear, seen, part)
    return parts


def head_ops(heads: HeadLinears, x: Tensor, out: Tensor, scratch: Scratch) -> Ops:
    """As HeadLinears; x: [rows, heads, K], out: [rows, heads, N], rows and heads apart."""
    if isinstance(heads.weights, HeadPanels):
        yield heads_call(heads.weights, x, out)
    for head, linear in enumerate(heads.linears):
        yield from linear_ops(linear, x[:, head], out[:, head], scratch)


def _rounded(
    x: Tensor, rounding: CodeRounding | None, scratch: Scratch, rows: Given = ROWS
) -> Made:
    """x as a product is given it."""
    if rounding is None:
        return x
    out = scratch.of("rounded", x.shape[1])
    yield round_call(x, out, rounding, rows)
    return out
