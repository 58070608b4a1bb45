"""Rows times a weight: torch's product, and bits that depend on the row alone."""

import math

import pytest
import torch

from compress_kernels.cpu import linear as compiled
from compress_kernels.cpu.library import native
from compress_kernels.ops.linear import linear
from compress_kernels.reference import linear as reference

needs_native = pytest.mark.skipif(native().library is None, reason=native().reason)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1, 1), (5, 7, 15), (37, 53, 100), (64, 130, 256)])
def test_is_the_product(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, w, b = (torch.randn(*shape).to(dtype) for shape in ((rows, k), (n, k), (n,)))
    want = torch.nn.functional.linear(x.double(), w.double(), b.double())
    close = {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.02}
    torch.testing.assert_close(linear(x, w, b).double(), want, **close)
    torch.testing.assert_close(linear(x, w).double() + b.double(), want, **close)
    apart = torch.full((rows, n + 2), 7.0, dtype=dtype)
    assert torch.equal(linear(x, w, b, apart[:, 1:-1]), linear(x, w, b))
    assert (apart[:, [0, -1]] == 7).all()
    assert torch.equal(linear(torch.cat((x, x), 1)[:, :k], w, b), linear(x, w, b))


def test_the_reference_is_a_loop_over_sums() -> None:
    x, w, b = torch.randn(3, 7), torch.randn(5, 7), torch.randn(5)
    found = reference.linear(x, w, b)
    for row in range(3):
        for output in range(5):
            terms = [float(x[row, k]) * float(w[output, k]) for k in range(7)]
            assert float(found[row, output]) == pytest.approx(
                math.fsum((*terms, float(b[output]))), abs=1e-5
            )


@needs_native
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 3, 8), (5, 7, 15), (37, 53, 100), (64, 130, 256)])
def test_compiled_code_computes_what_the_reference_does(rows: int, n: int, k: int) -> None:
    x, w, b = torch.randn(rows, k), torch.randn(n, k), torch.randn(n)
    out = torch.empty(rows, n)
    for bias in (b, None):
        compiled.linear(x, w, bias, out)
        torch.testing.assert_close(out, reference.linear(x, w, bias), atol=1e-4, rtol=1e-5)


@needs_native
@pytest.mark.parametrize(("n", "k"), [(50, 100), (300, 1000)])
def test_a_row_has_the_same_bits_beside_any_others(n: int, k: int) -> None:
    x, w, b = torch.randn(300, k), torch.randn(n, k), torch.randn(n)
    before = torch.get_num_threads()
    try:
        whole = linear(x, w, b)
        for threads, count in ((1, 1), (2, 2), (2, 3), (1, 6), (3, 16), (1, 77), (2, 300)):
            torch.set_num_threads(threads)
            rows = torch.randperm(300)[:count]
            assert torch.equal(linear(x[rows], w, b), whole[rows])
            outputs = slice(4, 4 * (n // 4) - 4)
            assert torch.equal(linear(x[rows], w[outputs], b[outputs]), whole[rows][:, outputs])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "n", "k"), [(3, 5, 0), (0, 5, 4), (3, 0, 4)], ids=str)
def test_nothing_to_multiply(rows: int, n: int, k: int) -> None:
    b = torch.ones(n)
    found = linear(torch.ones(rows, k), torch.ones(n, k), b)
    assert torch.equal(found, k + b.expand(rows, n))


@pytest.mark.parametrize("rows", [1, 3, 16, 65])
def test_fp16_has_the_sums_of_fp32_rounded_once(rows: int) -> None:
    x, w, b = torch.randn(rows, 70).half(), torch.randn(37, 70).half(), torch.randn(37).half()
    wide = linear(x.float(), w, b.float())
    found, into = linear(x, w, b), torch.zeros(rows, 40).half()
    linear(x, w, b, into[:, 2:39])
    if native().library is None:
        torch.testing.assert_close(found.float(), wide, atol=1e-2, rtol=1e-3)
    else:
        assert torch.equal(found, wide.half())
    assert torch.equal(into[:, 2:39], found)
    assert not into[:, :2].any()
    assert not into[:, 39:].any()


def test_wrong_arguments_are_named() -> None:
    x, w, b = torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(4)
    for call, message in (
        ((x[:, :2], w), r"x is torch.float32 \[2, 2\]; \[rows, 3\]"),
        ((x.half(), w), "x is torch.float16 .*; torch.float32 is needed"),
        ((x, w, b[:3]), r"bias is torch.float32 \[3\]; torch.float32 \[4\]"),
        ((x, w, b, x), r"out is torch.float32 \[2, 3\]; torch.float32 \[2, 4\], its columns"),
    ):
        with pytest.raises(ValueError, match=message):
            linear(*call)  # type: ignore[arg-type]
