"""Sums of xᵀx against float64."""

import pytest
import torch

from compress_kernels import gram_
from compress_kernels.cpu import gram as cpu
from compress_kernels.reference import gram as reference

SHAPES = [(1, 1), (2, 16), (5, 17), (64, 48), (513, 100), (700, 257), (1300, 200)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "columns"), SHAPES)
def test_against_float64(tokens: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    x = (torch.randn(tokens, columns) + 0.3).to(dtype)
    seed = torch.randn(columns, columns)
    start = seed @ seed.T
    start = (start + start.T) / 2
    want = start.double() + x.double().T @ x.double()
    for implementation in (gram_, cpu.gram_, reference.gram_):
        out = start.clone()
        implementation(x, out)
        assert torch.equal(out, out.T)
        assert (out - want).norm() / want.norm() < 1e-5


def test_wide_matrix_is_mirrored_across_strips() -> None:
    x = torch.randn(3, 2100)
    out = torch.zeros(2100, 2100)
    reference.gram_(x, out)
    torch.testing.assert_close(out, x.T @ x)


@pytest.mark.skipif(not cpu.has_bf16(), reason="no compiled bf16 dot products on this CPU")
def test_small_integers_are_exact_over_many_chunks() -> None:
    x = torch.randint(-3, 4, (20000, 70)).bfloat16()
    out = torch.zeros(70, 70)
    gram_(x, out)
    assert torch.equal(out, x.float().T @ x.float())


def test_threads_do_not_change_the_sum() -> None:
    x = torch.randn(900, 130).bfloat16()
    threads = torch.get_num_threads()
    sums = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            sums.append(torch.zeros(130, 130))
            cpu.gram_(x, sums[-1])
    finally:
        torch.set_num_threads(threads)
    if cpu.has_bf16():
        assert all(torch.equal(sums[0], other) for other in sums[1:])


def test_views_are_read_by_their_strides() -> None:
    whole = torch.randn(64, 60).bfloat16()
    part = whole[::2, 5:45]
    out, want = torch.zeros(40, 40), torch.zeros(40, 40)
    gram_(part, out)
    gram_(part.clone(), want)
    assert torch.equal(out, want)


@pytest.mark.parametrize(
    ("x", "out", "message"),
    [
        (torch.zeros(3), torch.zeros(3, 3), "x is shape [3]; [tokens, K] is needed"),
        (torch.zeros(3, 4).int(), torch.zeros(4, 4), "x is torch.int32; bf16, fp16 or fp32"),
        (torch.zeros(3, 4), torch.zeros(3, 3), "out is shape [3, 3]; [4, 4] is needed"),
        (torch.zeros(3, 4), torch.zeros(4, 4).double(), "out is torch.float64; torch.float32"),
        (torch.zeros(3, 4), torch.zeros(8, 8)[::2, ::2], "out is not contiguous"),
    ],
)
def test_misuse(x: torch.Tensor, out: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        gram_(x, out)
    assert message in str(error.value)
