"""Rows times weights of 16 bits: the bits that their fp32 copies give, which are those of one order
of sums."""

import pytest
import torch
from torch import Tensor

from compress_kernels.cpu.library import instruction_sets, native
from compress_kernels.ops.linear import linear, reads
from compress_kernels.reference import linear as reference

HALVES = (torch.bfloat16, torch.float16)
CPU = torch.device("cpu")

needs_native = pytest.mark.skipif(native().library is None, reason=native().reason)


def summed_in_lanes(x: Tensor, weight: Tensor) -> Tensor:
    """Each sum as csrc/products/linear.cpp has it: every lane along the columns, then half of them
    added to the other half, and the last four in pairs. fp64 holds what a fused multiply-add
    rounds, where inputs have few bits."""
    lanes = 16 if "avx512f" in instruction_sets() else 8
    x, weight = (torch.nn.functional.pad(t.double(), (0, -t.shape[1] % lanes)) for t in (x, weight))
    sums = torch.zeros(len(x), len(weight), lanes)
    for c in range(0, x.shape[1], lanes):
        part = slice(c, c + lanes)
        sums = (sums.double() + x[:, None, part] * weight[None, :, part]).float()
    while sums.shape[-1] > 4:
        first, last = sums.chunk(2, -1)
        sums = first + last
    return (sums[..., 0] + sums[..., 1]) + (sums[..., 2] + sums[..., 3])


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(1, 21, 300), (1, 5, 2100), (1, 18, 4500), (2, 9, 1100), (3, 17, 1300), (7, 19, 1060),
     (8, 5, 257), (18, 35, 2064)],
    ids=str,
)  # fmt: skip
def test_sums_are_in_one_order(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Whatever tiles, blocks of columns and streams of reads the number of rows asks for."""
    x, w = (torch.randn(*shape).bfloat16() for shape in ((rows, k), (n, k)))
    assert torch.equal(linear(x.float(), w.to(dtype)), summed_in_lanes(x, w.to(dtype)))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(33, 47), (7, 1025), (50, 130), (3, 4133)], ids=str)
def test_bits_are_those_of_the_widened_weight(n: int, k: int, dtype: torch.dtype) -> None:
    x, w, b = torch.randn(513, k), torch.randn(n, k).to(dtype), torch.randn(n)
    wide = w.float()
    for rows in (1, 2, 3, 4, 5, 8, 16, 17, 64, 513):
        if rows <= 64 or k < 100:
            part = x[-rows:]
            assert torch.equal(linear(part, w, b), linear(part, wide, b))
            assert torch.equal(reference.linear(part, w, b), reference.linear(part, wide, b))


@needs_native
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_number_is_widened_as_torch_does(dtype: torch.dtype) -> None:
    """Subnormals, infinities, NaN; in whole vectors and in what is left of a row."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    found = linear(torch.ones(1, 1), every[:, None])
    torch.testing.assert_close(found[0], every.float(), rtol=0, atol=0, equal_nan=True)
    finite = torch.where(every.isfinite(), every, 0).view(-1, 64)
    assert torch.equal(linear(torch.eye(64), finite), finite.float().T)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", [1, 6])
def test_nan_and_infinity_go_through(rows: int, dtype: torch.dtype) -> None:
    x, w = torch.rand(rows, 70), torch.rand(20, 70).to(dtype)
    w[3, 5], w[4, 69], w[19, 64] = float("inf"), float("nan"), float("-inf")
    found = linear(x, w)
    assert (found[:, 3] == float("inf")).all()
    assert found[:, 4].isnan().all()
    assert (found[:, 19] == float("-inf")).all()
    rest = [i for i in range(20) if i not in (3, 4, 19)]
    assert found[:, rest].isfinite().all()
    x[0, 0] = float("nan")
    found = linear(x, w)
    assert found[0].isnan().all()
    assert found[1:, rest].isfinite().all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_nothing_beside_the_output_is_written(dtype: torch.dtype) -> None:
    for rows, n, k in ((1, 17, 33), (2, 9, 1030), (7, 35, 1100)):
        x, w, b = torch.randn(rows, k), torch.randn(n, k).to(dtype), torch.randn(n)
        apart = torch.full((rows + 2, n + 2), 7.0)
        found = linear(x, w, b, apart[1:-1, 1:-1])
        assert torch.equal(found, linear(x, w, b))
        apart[1:-1, 1:-1] = 7.0
        assert (apart == 7.0).all()


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(("n", "k"), [(50, 100), (70, 1500)])
def test_a_row_has_the_same_bits_beside_any_others(n: int, k: int, dtype: torch.dtype) -> None:
    x, w, b = torch.randn(150, k), torch.randn(n, k).to(dtype), torch.randn(n)
    before = torch.get_num_threads()
    try:
        whole = linear(x, w, b)
        for threads, count in ((1, 1), (2, 2), (3, 3), (4, 1), (1, 6), (4, 17), (2, 150)):
            torch.set_num_threads(threads)
            rows = torch.randperm(150)[:count]
            assert torch.equal(linear(x[rows], w, b), whole[rows])
    finally:
        torch.set_num_threads(before)


def test_who_reads_what() -> None:
    compiled = native().library is not None
    for dtype in HALVES:
        assert reads(dtype, torch.float32, CPU) == compiled
        assert not reads(dtype, torch.float32, torch.device("cuda"))
        assert reads(dtype, dtype, CPU)
    assert not reads(torch.float32, torch.bfloat16, CPU)
    assert not reads(torch.bfloat16, torch.float16, CPU)
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16"):
        linear(torch.zeros(1, 2).bfloat16(), torch.zeros(1, 2).half())
