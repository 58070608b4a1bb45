"""Rows in bf16 times weights in bf16: one order of sums, whatever lies beside a row and however the
weight lies, the same on every instruction set."""

import pytest
import torch
from torch import Tensor

from compress_kernels.cpu.library import instruction_sets
from compress_kernels.ops.linear import linear, row_multiple
from compress_kernels.ops.pairs import compiled_pairs, pair_linear
from compress_kernels.pairs import (
    PairPanels,
    joined_pairs,
    lay_out_pairs,
    pair_numbers,
    weight_of,
)
from compress_kernels.reference import pairs as reference

ROWS = (1, 2, 3, 4, 5, 8, 12, 13, 16, 17, 64, 513)
SHAPES = ((1, 1), (33, 47), (31, 258), (70, 1101))
SMALLEST = 2.0**-126

needs_native = pytest.mark.skipif(
    not compiled_pairs(torch.device("cpu")), reason="nothing is compiled, or not for x86"
)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def normal(x: Tensor) -> Tensor:
    """Numbers below 2^-126 as 0."""
    return torch.where(x.abs() < SMALLEST, torch.zeros_like(x), x)


def summed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As csrc/products/pair_rows.cpp has it: a chain an output, of two columns the second first.
    fp64 holds what a fused multiply-add rounds."""
    x, weight = (
        torch.nn.functional.pad(normal(t.double()), (0, t.shape[1] % 2)) for t in (x, weight)
    )
    sums = torch.zeros(len(x), len(weight))
    for c in range(0, x.shape[1], 2):
        for column in (c + 1, c):
            sums = normal((sums.double() + x[:, column, None] * weight[:, column]).float())
    return (sums if bias is None else sums + bias.float()).bfloat16()


@needs_native
@pytest.mark.parametrize(("n", "k"), [(1, 1), (21, 301), (40, 1040), (18, 2111)])
def test_sums_are_in_one_order(n: int, k: int) -> None:
    """In blocks of columns and without; two blocks of rows."""
    w, b = numbers(n, k), numbers(n)
    panels = lay_out_pairs(w)
    for rows in (1, 3, 13, *([200] if k < 400 else [])):
        x = numbers(rows, k)
        assert torch.equal(pair_linear(x, panels, b), summed(x, w, b))
        assert torch.equal(linear(x, w), summed(x, w))


@needs_native
@pytest.mark.skipif("avx2" not in instruction_sets(), reason="products are not fused")
def test_small_numbers_count_as_zero() -> None:
    """As the instruction has it; the bias is added behind it, and kept."""
    scale = torch.exp2(torch.tensor([[-75.0], [-66.0], [-62.0], [-58.0], [-54.0], [-50.0]]))
    x, w = (torch.randn(6, 40) * scale).bfloat16(), (torch.randn(9, 40) * 2.0**-66).bfloat16()
    x[:, 3], w[:, 5] = 2.0**-130, -(2.0**-127)
    w[:, 3], x[:, 5] = 2.0**100, 2.0**90
    found = pair_linear(x, lay_out_pairs(w))
    assert torch.equal(found, summed(x, w))
    assert (found == 0).any()
    assert (found != 0).any()
    tiny = torch.full((9,), 2.0**-130).bfloat16()
    assert (pair_linear(x[:1] * 0, lay_out_pairs(w), tiny) == 2.0**-130).all()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_near_the_product_in_fp64(n: int, k: int) -> None:
    w, b = numbers(n, k), numbers(n)
    panels = lay_out_pairs(w)
    for rows in ROWS:
        x = numbers(rows, k)
        want = x.double() @ w.double().T + b.double()
        room = 2.0**-8 * want.abs() + 2.0**-20 * (x.double().abs() @ w.double().abs().T + 1)
        assert ((pair_linear(x, panels, b).double() - want).abs() <= room).all()
        assert ((reference.pair_linear(x, panels, b).double() - want).abs() <= 2 * room).all()


@needs_native
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_has_the_same_bits_beside_any_others(n: int, k: int) -> None:
    """In panels and by rows, on one thread and on four."""
    x, w, b = numbers(513, k), numbers(n, k), numbers(n)
    panels, before = lay_out_pairs(w), torch.get_num_threads()
    try:
        whole = pair_linear(x, panels, b)
        for threads, count in enumerate(ROWS):
            torch.set_num_threads(1 + threads % 4)
            rows = torch.randperm(513)[:count]
            assert torch.equal(pair_linear(x[rows], panels, b), whole[rows])
            assert torch.equal(linear(x[rows], w, b), whole[rows])
    finally:
        torch.set_num_threads(before)
    assert row_multiple(torch.bfloat16, torch.device("cpu")) == 1


def test_rows_may_lie_apart_and_nothing_beside_them_is_written() -> None:
    for rows, n, k in ((1, 17, 33), (2, 33, 1030), (13, 70, 41)):
        x, w, b = numbers(rows, 2 * k)[:, :k], numbers(n, k), numbers(n)
        apart = torch.full((rows + 2, n + 2), 7.0).bfloat16()
        found = linear(x, w, b, apart[1:-1, 1:-1])
        assert torch.equal(found, linear(x.contiguous(), w, b))
        assert torch.equal(pair_linear(x.T.contiguous().T, lay_out_pairs(w), b), found)
        apart[1:-1, 1:-1] = 7.0
        assert (apart == 7.0).all()


@pytest.mark.parametrize("rows", [1, 6])
def test_nan_and_infinity_go_through(rows: int) -> None:
    x, w = torch.rand(rows, 70).bfloat16(), torch.rand(40, 70).bfloat16()
    w[3, 5], w[4, 69], w[39, 64] = float("inf"), float("nan"), float("-inf")
    found = pair_linear(x, lay_out_pairs(w))
    assert (found[:, 3] == float("inf")).all()
    assert found[:, 4].isnan().all()
    assert (found[:, 39] == float("-inf")).all()
    rest = [i for i in range(40) if i not in (3, 4, 39)]
    assert found[:, rest].isfinite().all()
    x[0, 0] = float("nan")
    found = pair_linear(x, lay_out_pairs(w))
    assert found[0].isnan().all()
    assert found[1:, rest].isfinite().all()


def test_panels_are_a_permutation() -> None:
    parts = [numbers(n, 47) for n in (32, 64, 5, 33)]
    for part in parts:
        panels = lay_out_pairs(part)
        assert panels.values.numel() == pair_numbers(panels.shape)
        assert torch.equal(weight_of(panels), part)
        index = torch.randint(len(part), (9,))
        assert torch.equal(panels.rows(index), part[index])
    for some in (parts[:2], parts[:3], parts):
        found = joined_pairs([lay_out_pairs(part) for part in some])
        want = lay_out_pairs(torch.cat(some))
        assert torch.equal(found.values, want.values)
        assert found.shape == want.shape


def test_what_does_not_fit_is_refused() -> None:
    x, panels = numbers(2, 4), lay_out_pairs(numbers(3, 4))
    with pytest.raises(ValueError, match=r"x is torch\.float32"):
        pair_linear(x.float(), panels)
    with pytest.raises(ValueError, match=r"bias is torch\.bfloat16 \[4\]"):
        pair_linear(x, panels, numbers(4))
    with pytest.raises(ValueError, match=r"values is torch\.bfloat16"):
        pair_linear(x, PairPanels(panels.values, (33, 4)))
    square = lay_out_pairs(numbers(3, 64)).values.transpose(1, 2)
    with pytest.raises(ValueError, match="values has strides"):
        pair_linear(numbers(2, 64), PairPanels(square, (3, 64)))
