"""Rows of heads times a weight of each: the product, and bits that depend on the row alone."""

import pytest
import torch

from compress_kernels.cpu import linear as compiled
from compress_kernels.cpu.library import native
from compress_kernels.heads import HeadPanels, lay_out_heads
from compress_kernels.ops.linear import head_linear
from compress_kernels.reference import linear as reference

needs_native = pytest.mark.skipif(native().library is None, reason=native().reason)
SHAPES = [(1, 1, 1, 1), (5, 3, 7, 15), (8, 8, 96, 32), (64, 8, 32, 96), (37, 2, 53, 200)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "heads", "n", "k"), SHAPES)
def test_is_the_product_of_each_head(
    rows: int, heads: int, n: int, k: int, dtype: torch.dtype
) -> None:
    x, weights = torch.randn(rows, heads, k), torch.randn(heads, n, k).to(dtype)
    panels = lay_out_heads(weights)
    assert panels.shape == (heads, n, k)
    want = torch.einsum("rhk,hnk->rhn", x.double(), weights.double())
    found = head_linear(x, panels)
    for each in (found, reference.head_linear(x, panels)):
        torch.testing.assert_close(each.double(), want, atol=1e-4, rtol=1e-5)
    assert torch.equal(found, head_linear(x, lay_out_heads(weights.float())))


@needs_native
@pytest.mark.parametrize(("rows", "heads", "n", "k"), SHAPES)
def test_fp16_has_the_sums_of_fp32_rounded_once(rows: int, heads: int, n: int, k: int) -> None:
    x, panels = torch.randn(rows, heads, k).half(), lay_out_heads(torch.randn(heads, n, k).half())
    assert torch.equal(head_linear(x, panels), head_linear(x.float(), panels).half())
    one = torch.cat([head_linear(row[None], panels) for row in x])
    assert torch.equal(one, head_linear(x, panels))


@needs_native
@pytest.mark.parametrize(("n", "k"), [(96, 32), (32, 96), (50, 330), (1, 64)])
def test_a_row_has_the_same_bits_beside_any_others(n: int, k: int) -> None:
    x, panels = torch.randn(70, 5, k), lay_out_heads(torch.randn(5, n, k).bfloat16())
    before = torch.get_num_threads()
    try:
        whole = head_linear(x, panels)
        for threads, count in ((1, 1), (2, 2), (2, 3), (1, 6), (3, 16), (1, 37), (2, 70)):
            torch.set_num_threads(threads)
            rows = torch.randperm(70)[:count]
            assert torch.equal(head_linear(x[rows], panels), whole[rows])
            some = HeadPanels(panels.values[2:4].contiguous(), n)
            assert torch.equal(head_linear(x[rows, 2:4], some), whole[rows, 2:4])
    finally:
        torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize(("rows", "n"), [(1, 17), (7, 96), (9, 3)])
def test_rows_and_heads_may_lie_apart_and_nothing_else_is_written(rows: int, n: int) -> None:
    panels = lay_out_heads(torch.randn(4, n, 32))
    x, out = torch.randn(rows, 4, 64), torch.full((rows, 6, n + 5), 7.0)
    compiled.head_linear(x[..., 32:], panels, out[:, 1:-1, 2:-3])
    assert torch.equal(out[:, 1:-1, 2:-3], head_linear(x[..., 32:].contiguous(), panels))
    out[:, 1:-1, 2:-3] = 7
    assert (out == 7).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row_and_head(value: float) -> None:
    x, panels = torch.randn(6, 3, 40), lay_out_heads(torch.randn(3, 20, 40))
    want = head_linear(x, panels)
    x[4, 1, 39] = value
    found = head_linear(x, panels)
    assert not found[4, 1].isfinite().any()
    found[4, 1] = want[4, 1]
    assert torch.equal(found, want)


@pytest.mark.parametrize(("rows", "n", "k"), [(0, 5, 4), (3, 5, 0), (3, 0, 4)], ids=str)
def test_no_rows_columns_or_outputs(rows: int, n: int, k: int) -> None:
    found = head_linear(torch.ones(rows, 2, k), lay_out_heads(torch.ones(2, n, k)))
    assert torch.equal(found, torch.full((rows, 2, n), float(k)))


def test_wrong_arguments_are_named() -> None:
    x, panels = torch.zeros(2, 3, 4), lay_out_heads(torch.zeros(3, 5, 4))
    apart = torch.zeros(3, 4, 32)[..., :16]
    for call, message in (
        ((x[:, :2], panels), r"x is torch.float32 \[2, 2, 4\]; \[rows, 3, 4\]"),
        ((x.half(), panels), "x is torch.float16 .*; torch.float32 is needed"),
        ((x, HeadPanels(panels.values, 17)), r"values is .*\[3, 4, 17 filled up to 16\]"),
        ((x, HeadPanels(apart, 5)), "values has strides .*; a contiguous tensor is needed"),
    ):
        with pytest.raises(ValueError, match=message):
            head_linear(*call)
