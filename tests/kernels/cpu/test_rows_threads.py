"""Rows that threads share have the bits of those of one."""

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compress_kernels.cpu import rows
from compress_kernels.cpu.library import native
from compress_kernels.cpu.states import store_states
from compress_kernels.ops.linear import linear

pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)
MANY, HEADS, DIM = 601, 3, 50  # more numbers than one thread is handed


def stored(x: Tensor) -> Tensor:
    """In 8 bits, with scales."""
    codes = torch.zeros(MANY // 4 + 1, HEADS, 4, DIM, dtype=torch.int8)
    scales = torch.zeros(codes.shape[:3], dtype=torch.float16)
    store_states(x, codes, torch.arange(MANY), scales)
    return codes * scales.float()[..., None]


def added(x: Tensor) -> Tensor:
    flat, out = x.flatten(1), torch.empty(MANY, HEADS * DIM)
    other = flat.flip(0)
    library, struct = native().library, rows.add_struct(flat, other, out)
    assert library is not None
    library.add_rows(ctypes.byref(struct))
    return out


WEIGHT, ANGLES = torch.randn(DIM), torch.rand(MANY, 12) * 100
WIDE = torch.randn(40, HEADS * DIM)
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: rows.rms_norm(x, WEIGHT, 1e-6, False),
    "layer_norm": lambda x: rows.layer_norm(x, WEIGHT, WEIGHT, 1e-6),
    "rotate": lambda x: rows.rotate(x, ANGLES.cos(), ANGLES.sin()),
    "rotate neighbours": lambda x: rows.rotate(x, ANGLES.cos(), ANGLES.sin(), interleaved=True),
    "gate": lambda x: rows.gate(x.flatten(1), x.flatten(1).flip(0), "silu"),
    "add": added,
    "store": stored,
    "highest": lambda x: torch.stack([part.double() for part in rows.highest(x.flatten(1))]),
    "rows of a product": lambda x: linear(x.flatten(1), WIDE),
    "rows of a product in bf16": lambda x: linear(x.flatten(1).bfloat16(), WIDE.bfloat16()),
}


@pytest.mark.parametrize("name", OPS)
def test_threads_do_not_change_rows(name: str) -> None:
    x, before, found = torch.randn(MANY, HEADS, DIM), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            found.append([OPS[name](x) for _ in range(5)])
    finally:
        torch.set_num_threads(before)
    for again in found:
        for result in again:
            assert torch.equal(result, found[0][0])
