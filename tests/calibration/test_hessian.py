"""Input statistics equal their definition and do not depend on how tokens arrive."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import DataError
from compress_calibration.hessian import GramAccumulator, SquareSums


def normal(tokens, features, seed=0):
    return torch.randn(tokens, features, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_hessian_is_the_mean_outer_product(dtype):
    x = normal(300, 24).to(dtype)
    sums = GramAccumulator.create("q", 24)
    sums.add(x)
    exact = x.double().T @ x.double() / 300
    torch.testing.assert_close(sums.hessian().double(), exact, rtol=1e-5, atol=1e-6)
    assert sums.hessian().dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_squares_alone_are_the_diagonal(dtype):
    x = normal(300, 24).to(dtype)
    sums = SquareSums.create("q", 24)
    assert torch.equal(sums.mean(), torch.zeros(24))
    for part in x.split([200, 0, 100]):
        sums.add(part)
    assert sums.tokens == 300
    exact = x.double().square().mean(0)
    torch.testing.assert_close(sums.mean().double(), exact, rtol=1e-5, atol=1e-6)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_parts_add_up(parts):
    x = normal(sum(parts), 6)
    whole, split = (GramAccumulator.create("q", 6, magnitudes=True) for _ in range(2))
    whole.add(x)
    for part in x.split(parts):
        split.add(part)
    assert split.tokens == whole.tokens == sum(parts)
    torch.testing.assert_close(split.hessian(), whole.hessian())
    stats = split.stats()
    assert stats.absmax is not None
    assert stats.absmean is not None
    expected = x.abs().amax(dim=0) if len(x) else torch.zeros(6)
    assert torch.equal(stats.absmax, expected)
    mean = x.abs().mean(dim=0) if len(x) else torch.zeros(6)
    torch.testing.assert_close(stats.absmean, mean)


def test_nothing_seen_is_all_zero():
    stats = GramAccumulator.create("expert", 4).stats()
    assert stats.tokens == 0
    assert stats.absmax is None
    assert torch.equal(stats.hessian, torch.zeros(4, 4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_named(bad):
    sums = GramAccumulator.create("mlp.down_proj", 4)
    x = normal(8, 4)
    x[3, 2] = bad
    sums.add(x)
    message = r"inputs of mlp\.down_proj are not finite in 1 of 4 features \(first: 2\); run with"
    with pytest.raises(DataError, match=message):
        sums.hessian()
    squares = SquareSums.create("mlp.down_proj", 4)
    squares.add(x)
    with pytest.raises(DataError, match=message):
        squares.mean()
