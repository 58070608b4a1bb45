"""Moments equal their definition, and do not depend on how tokens arrive or on which rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import DataError
from compress_calibration.moments import MomentsAccumulator


def normal(tokens, features, seed=0):
    return torch.randn(tokens, features, generator=torch.Generator().manual_seed(seed))


def accumulated(x, y, parts=None):
    sums = MomentsAccumulator.create("o", x.shape[1], y.shape[1])
    for a, b in zip(*(v.split(parts or [len(x)]) for v in (x, y)), strict=True):
        sums.add(a, b)
    return sums


def assert_same(one, other):
    assert one.tokens == other.tokens
    for name in ("gram", "cross", "energy", "x_sum", "y_sum"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moments_are_sums_over_tokens(dtype):
    x, y = normal(300, 24).to(dtype), normal(300, 7, seed=1)
    got, x, y = accumulated(x, y).moments(), x.double(), y.double()
    for value, exact in [
        (got.gram, x.T @ x),
        (got.cross, x.T @ y),
        (got.energy, y.square().sum(0)),
        (got.x_sum, x.sum(0)),
        (got.y_sum, y.sum(0)),
    ]:
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-4)
    assert got.tokens == 300


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_parts_add_up(parts):
    x, y = normal(sum(parts), 6), normal(sum(parts), 3, seed=1)
    whole = accumulated(x, y)
    assert_same(accumulated(x, y, parts).moments(), whole.moments())
    cut = parts[0]
    halves = [accumulated(x[s], y[s]).moments() for s in (slice(cut), slice(cut, None))]
    assert_same(halves[0] + halves[1], whole.moments())


def test_ranks_add_up():
    x, y = normal(40, 6), normal(40, 3, seed=1)
    shares = [accumulated(x[:25], y[:25]), accumulated(x[25:], y[25:])]
    s, t = (share.sums for share in shares)
    other = iter([t.gram, t.cross, t.energy, t.x_sum, t.y_sum, torch.tensor([15])])
    joined = shares[0].over(lambda value: value + next(other))
    assert_same(joined.moments(), accumulated(x, y).moments())
    assert joined.key == "o"
    assert s.tokens == 0  # the accumulator counts, its sums do not


def test_moments_of_some_inputs():
    x, y, kept = normal(40, 6), normal(40, 3, seed=1), torch.tensor([0, 2, 5])
    assert_same(accumulated(x, y).moments().of(kept), accumulated(x[:, kept], y).moments())


def test_nothing_seen_is_all_zero():
    moments = MomentsAccumulator.create("expert", 4, 3).moments()
    assert moments.tokens == 0
    assert torch.equal(moments.gram, torch.zeros(4, 4))
    assert torch.equal(moments.cross, torch.zeros(4, 3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("what", ["inputs", "targets"])
def test_values_that_are_not_finite_are_named(bad, what):
    x, y = normal(8, 4), normal(8, 4, seed=1)
    (x if what == "inputs" else y)[3, 2] = bad
    message = rf"{what} of o are not finite in 1 of 4 features \(first: 2\); run with --dtype fp32"
    with pytest.raises(DataError, match=message):
        accumulated(x, y).moments()
