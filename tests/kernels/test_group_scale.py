"""The scale search: optimal among its candidates, and the compiled search equals it."""

import pytest
import torch
from torch import Tensor

from compress_kernels import group_scale
from compress_kernels.cpu import scale as cpu
from compress_kernels.cpu.library import native
from compress_kernels.gptq.problem import Grid
from compress_kernels.reference import scale as reference

RATIOS = torch.linspace(1.0, 0.5, 21)
# For symmetric grids; not 1, where the largest weight is as far from code 7 as from -8.
BOTH = torch.cat([RATIOS, -RATIOS]) * 1.03
needs_native = pytest.mark.skipif(native().library is None, reason=native().reason)


def dequantize(w: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    z = 0 if zero is None else zero[:, None].double()
    codes = (torch.round(w.double() / scale[:, None].double()) + z).clamp(
        -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    )
    return (codes - z) * scale[:, None].double()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_no_candidate_is_better(bits: int, symmetric: bool) -> None:
    torch.manual_seed(bits)
    w = torch.randn(20, 32) * 0.02
    importance = torch.rand(32) + 0.1

    def cost(ratios: Tensor) -> Tensor:
        scale, zero = group_scale(w, ratios, importance, bits, symmetric, torch.bfloat16)
        error = w.double() - dequantize(w, scale, zero, bits)
        return (error.square() * importance.double()).sum(1)

    ratios = BOTH if symmetric else RATIOS
    each = torch.stack([cost(ratio.reshape(1)) for ratio in ratios])
    torch.testing.assert_close(cost(ratios), each.amin(0), rtol=1e-5, atol=0)


def test_plain_minmax() -> None:
    w = torch.tensor([[-1.0, 0.25, 0.5], [0.0, 3.0, 1.0]])
    one = torch.ones(1)
    scale, zero = group_scale(w, one, None, 4, True, torch.float32)
    assert torch.equal(scale, torch.tensor([1.0, 3.0]) / 7.5)
    assert zero is None
    scale, zero = group_scale(w, one, None, 4, False, torch.float32)
    assert torch.equal(scale, torch.tensor([1.5, 3.0]) / 15)
    assert zero is not None
    assert zero.tolist() == [2, -8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_negative_ratio_turns_the_grid_around(dtype: torch.dtype) -> None:
    w = torch.cat([torch.randn(20, 32) * 0.02, torch.zeros(1, 32)])
    plain, _ = group_scale(-w, RATIOS, None, 4, True, dtype)
    turned, _ = group_scale(w, -RATIOS, None, 4, True, dtype)
    assert torch.equal(turned[:-1], -plain[:-1])
    assert turned[-1] == 1


def test_the_larger_side_gets_the_code_more() -> None:
    w = torch.tensor([[8.0, -7.0, 3.0, -1.0], [-8.0, 7.0, 3.0, -1.0]])
    scale, _ = group_scale(w, torch.tensor([1.0, -1.0]) * 7.5 / 8, None, 4, True, torch.bfloat16)
    assert scale.tolist() == [-1.0, 1.0]
    assert torch.equal(dequantize(w, scale, None, 4).float(), w)


def test_first_ratio_wins_a_tie_and_zero_rows_get_scale_one() -> None:
    w = torch.zeros(3, 8)
    w[1] = 1e-30  # rounds to 0 in fp16
    scale, _ = group_scale(w, RATIOS, None, 4, True, torch.float16)
    assert scale.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scale_is_exact_in_its_dtype_even_beyond_its_range(dtype: torch.dtype) -> None:
    w = torch.tensor([[1e-9, -2e-9], [3e-5, 1e-5], [1e7, -2e6], [0.3, 0.1]])
    for symmetric in (True, False):
        scale, _ = group_scale(w, RATIOS, None, 4, symmetric, dtype)
        assert torch.equal(scale, scale.to(dtype).float())
        assert bool(torch.isfinite(scale).all())


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_compiled_equals_reference(bits: int, symmetric: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    spread = torch.logspace(-9, 2, 67)[:, None]  # fp16 scales from subnormal to large
    w = torch.randn(67, 45) * spread
    importance = torch.rand(45)
    grid = Grid(bits, symmetric, dtype)
    for weights in (None, importance):
        for ratios in (torch.ones(1), RATIOS, *((-torch.ones(1), BOTH) if symmetric else ())):
            want, want_zero = reference.group_scale(w, ratios, weights, grid)
            got, got_zero = cpu.group_scale(w, ratios, weights, grid)
            assert (got == want).float().mean() >= 0.98  # near ties fall either way
            if len(ratios) == 1:
                assert torch.equal(got, want)
            if want_zero is not None and got_zero is not None:
                assert (got_zero == want_zero).float().mean() >= 0.98


@needs_native
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", [(1, 16384), (1, 100003), (3, 40000)])
def test_few_wide_rows_equal_the_reference(shape: tuple[int, int], symmetric: bool) -> None:
    torch.manual_seed(1)
    w, importance = torch.randn(shape) * 0.02, torch.rand(shape[1])
    grid = Grid(4, symmetric, torch.float32)
    one = torch.ones(1)
    for got, want in zip(
        cpu.group_scale(w, one, None, grid),
        reference.group_scale(w, one, None, grid),
        strict=True,
    ):
        assert (got is None) == (want is None)
        assert got is None or want is None or torch.equal(got, want)
    for weights in (None, importance):

        def cost(found: tuple[Tensor, Tensor | None], weights: Tensor | None = weights) -> Tensor:
            squared = (w.double() - dequantize(w, *found, 4)).square()
            return (squared if weights is None else squared * weights.double()).sum(1)

        ratios = BOTH if symmetric else RATIOS
        got = cpu.group_scale(w, ratios, weights, grid)
        want = reference.group_scale(w, ratios, weights, grid)
        torch.testing.assert_close(cost(got), cost(want), rtol=1e-6, atol=0)


@needs_native
def test_threads_do_not_change_the_scale_of_a_wide_row() -> None:
    w, importance = torch.randn(1, 1 << 18), torch.rand(1 << 18)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            found.append(cpu.group_scale(w, RATIOS, importance, Grid(4, True, torch.float32))[0])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": torch.zeros(3)}, "w is shape [3]; [N, g], not empty is needed"),
        ({"w": torch.zeros(2, 8, dtype=torch.float64)}, "w is torch.float64; torch.float32"),
        ({"ratios": torch.zeros(0)}, "ratios is shape [0]; [R], not empty, is needed"),
        ({"ratios": torch.tensor([1.0, 0.0])}, "ratios is [1.0, 0.0]; values that are finite and"),
        (
            {"ratios": torch.tensor([1.0, -1.0]), "symmetric": False},
            "ratios is [1.0, -1.0]; positive values",
        ),
        ({"importance": torch.ones(7)}, "importance is shape [7]; [8] is needed"),
        ({"bits": 9}, "bits is 9; 2 to 8 is needed"),
        ({"scale_dtype": torch.float64}, "scale_dtype is torch.float64; fp32, bf16 or fp16"),
    ],
)
def test_misuse(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "w": torch.zeros(2, 8),
        "ratios": torch.ones(1),
        "importance": None,
        "bits": 4,
        "symmetric": True,
        "scale_dtype": torch.bfloat16,
    }
    with pytest.raises(ValueError) as error:  # noqa: PT011
        group_scale(**{**arguments, **change})
    assert message in str(error.value)
