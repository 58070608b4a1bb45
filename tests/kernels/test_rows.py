"""Norms, rotations and gates of the compiled code are torch's, and each row's its own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compress_kernels.cpu import rows as compiled
from compress_kernels.cpu.library import native
from compress_kernels.ops import rows as ops
from compress_kernels.reference import rows as reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)


def check(
    make: Callable[[object, Tensor], Tensor], x: Tensor, off: dict[torch.dtype, float]
) -> None:
    """Close to torch; and rows in other places of other tensors have the same bits."""
    found, wanted = make(compiled, x), make(reference, x)
    assert found.dtype == x.dtype
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=off[x.dtype])
    order = torch.randperm(len(x))[:7]
    assert torch.equal(make(compiled, x[order].repeat(3, *[1] * (x.dim() - 1)))[7:14], found[order])


# Where a sum or a power differs by a hair, the rounded numbers differ by one step.
STEP = {torch.float32: 3e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@pytest.mark.parametrize("width", [8, 100, 256])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rms_norm(dtype: torch.dtype, late: bool, width: int) -> None:
    x, weight = torch.randn(40, width).to(dtype), torch.randn(width)
    weight = weight if late else weight.to(dtype)
    check(lambda rows, x: rows.rms_norm(x, weight, 1e-6, late), x, STEP)  # type: ignore[attr-defined]
    heads = torch.randn(6, 4, width).to(dtype)[:, 1:3]
    found = compiled.rms_norm(heads, weight, 1e-6, late)
    want = reference.rms_norm(heads, weight, 1e-6, late)
    torch.testing.assert_close(found, want, atol=1e-6, rtol=STEP[dtype])


def test_rotate_of_neighbours() -> None:
    """As of the same numbers with all first ones in front."""
    x, angles = torch.randn(9, 5, 48)[:, 1:4], torch.rand(9, 16) * 100
    apart = torch.cat((x[..., :32:2], x[..., 1:32:2], x[..., 32:]), -1)
    for rows in (compiled, reference):
        found = rows.rotate(x, angles.cos(), angles.sin(), interleaved=True)
        assert torch.equal(found, rows.rotate(apart, angles.cos(), angles.sin()))


@pytest.mark.parametrize(("dim", "pairs"), [(8, 4), (64, 32), (80, 10), (96, 48)])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rotate(dtype: torch.dtype, late: bool, dim: int, pairs: int) -> None:
    angles = torch.rand(40, pairs) * 100
    # Queries of a joint product: rows lie apart.
    x = torch.randn(40, 5, dim).to(dtype)[:, :3]
    cos, sin = (a if late else a.to(dtype) for a in (angles.cos(), angles.sin()))
    found, want = compiled.rotate(x, cos, sin), reference.rotate(x, cos, sin)
    assert torch.equal(found, want)
    for row in (0, 17, 39):
        one = slice(row, row + 1)
        assert torch.equal(compiled.rotate(x[one], cos[one], sin[one]), found[one])


@pytest.mark.parametrize("width", [8, 100, 256])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_layer_norm(dtype: torch.dtype, width: int) -> None:
    x = (torch.randn(40, width) + 3).to(dtype)
    weight, bias = torch.randn(2, width).to(dtype).unbind()
    for both in ((weight, bias), (weight, None)):
        check(lambda rows, x, b=both: rows.layer_norm(x, *b, 1e-5), x, STEP)  # type: ignore[attr-defined]
    x[3, 1] = torch.nan
    assert compiled.layer_norm(x, weight, bias, 1e-5).isnan().any(1).nonzero().flatten() == 3


@pytest.mark.parametrize("function", compiled.FUNCTIONS)
@pytest.mark.parametrize("width", [8, 100])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gate(dtype: torch.dtype, width: int, function: str) -> None:
    both = (torch.randn(40, 2 * width) * 8).to(dtype)
    both[0, 0], both[1, 0], both[2, 0] = 300.0, -300.0, 0.0
    check(lambda rows, x: rows.gate(*x.chunk(2, -1), function), both, STEP)  # type: ignore[attr-defined]
    both[3, 1] = torch.nan
    gate, up = both.chunk(2, -1)
    assert compiled.gate(gate, up, function)[3, 1].isnan()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", [1, 5, 16, 333, 4096])
def test_highest(width: int, dtype: torch.dtype) -> None:
    x = torch.randn(30, width).mul(4).round().to(dtype)  # of equals the first
    x[1], x[2, -1], x[3, 0] = -torch.inf, torch.inf, -torch.inf
    index, values = compiled.highest(x)
    assert torch.equal(index, x.argmax(-1))
    assert torch.equal(values, x.amax(-1).float())
    x[::3, width // 2], x[::6, -1] = torch.nan, torch.nan
    index, values = compiled.highest(x)
    assert torch.equal(index, x.argmax(-1))
    assert values[::3].isnan().all()
    assert torch.equal(values[1::3], x.amax(-1).float()[1::3])


def test_wrong_arguments_are_named() -> None:
    x, half = torch.zeros(2, 8), torch.zeros(8, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"weight is torch.float16 \[8\]; torch.float32 \[8\]"):
        ops.rms_norm(x, half, 1e-6, False)
    with pytest.raises(ValueError, match=r"weight is torch.float16 .*; torch.float32"):
        ops.rms_norm(x.half(), half, 1e-6, True)
    heads, turns = torch.zeros(2, 1, 8), torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"cos is .* \[2, 5\]; \[2, up to 4\]"):
        ops.rotate(heads, turns, turns)
    with pytest.raises(ValueError, match=r"sin is torch\.float64"):
        ops.rotate(heads, turns[:, :4], turns[:, :4].double())
    with pytest.raises(ValueError, match=r"bias is torch.float16 \[8\]; torch.float32 \[8\]"):
        ops.layer_norm(x, x[0], half, 1e-5)
    with pytest.raises(ValueError, match=r"up is torch\.float16"):
        ops.gate(x, x.half(), "silu")
