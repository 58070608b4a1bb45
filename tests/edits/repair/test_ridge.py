"""A repair is the least squares fit it claims to be, and makes held-out rows never worse."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.edits.repair import ridge as ridge_module
from compress.edits.repair.ridge import (
    PENALTIES,
    Affine,
    error_saved,
    refit,
    refit_to_lack,
    remainder,
    ridge,
)
from compress.errors import DataError
from compress_calibration.moments import Moments, MomentsAccumulator


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(tokens, columns, seed=0):
    return normal(tokens, columns, seed=seed) @ normal(columns, columns, seed=99) + 0.5


def exactly(x, y):
    """Moments in fp64 throughout."""
    x, y = x.double(), y.double()
    sums = (x.T @ x, x.T @ y, y.square().sum(0), x.sum(0), y.sum(0))
    return Moments(*sums, len(x))


def accumulated(x, y):
    sums = MomentsAccumulator.create("down", x.shape[1], y.shape[1])
    sums.add(x, y)
    return sums.moments()


def error(x, y, linear):
    made = x.double() @ linear.weight.double().T
    made = made if linear.bias is None else made + linear.bias.double()
    return float((y.double() - made).square().sum())


def textbook(x, y, source, penalty):
    """The penalised fit by augmented rows: one row of sqrt(penalty G_cc) for each weight, and more
    for a column that gives less than a tenth of what columns give in their mean."""
    x, y, w0 = x.double(), y.double(), source.weight.double()
    if source.bias is None:
        around_x, around_y = 0.0, 0.0
    else:
        around_x, around_y = x.mean(0), y.mean(0)
    xc, yc = x - around_x, y - around_y
    energy, size = x.square().sum(0), w0.square().sum(0)
    unit = torch.maximum(energy, 0.1 * (energy * size).mean() / size)
    pull = (penalty * unit).sqrt().diag()
    rows = torch.cat([xc, pull])
    weight = torch.linalg.lstsq(rows, torch.cat([yc, pull @ w0.T])).solution.T
    return Affine(weight, None if source.bias is None else around_y - weight @ around_x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("penalty", [1e-4, 1e-2, 1.0])
def test_the_fit_is_that_of_augmented_rows(bias, penalty):
    x, y = correlated(60, 9), normal(60, 4, seed=1) + 2
    source = Affine(normal(4, 9, seed=2), normal(4, seed=3) if bias else None)
    change = ridge(remainder(exactly(x, y), source), penalty, source)
    want = textbook(x, y, source, penalty)
    torch.testing.assert_close(source.weight + change.weight, want.weight, rtol=1e-8, atol=1e-9)
    if bias:
        torch.testing.assert_close(source.bias + change.bias, want.bias, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("bias", [False, True])
def test_errors_follow_from_moments_alone(bias):
    x, y = correlated(60, 9), normal(60, 4, seed=1) + 2
    linear, change = (
        Affine(normal(4, 9, seed=s), normal(4, seed=s + 1) if bias else None) for s in (2, 4)
    )
    left = remainder(exactly(x, y), linear)
    assert float(left.energy.sum()) == pytest.approx(error(x, y, linear), rel=1e-9)
    changed = Affine(linear.weight + change.weight, linear.bias + change.bias if bias else None)
    saved = error(x, y, linear) - error(x, y, changed)
    assert error_saved(left, change) == pytest.approx(saved, rel=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_the_penalty_is_the_best_on_held_out_rows(bias):
    """Few and noisy rows, so that neither end of the grid wins; errors are of unseen rows."""
    x, h = correlated(30, 12), correlated(200, 12, seed=5)
    truth, kept = normal(4, 12, seed=2), torch.tensor([0, 1, 3, 4, 6, 7, 9, 10])
    y, hy = (v @ truth.T + 3 * normal(len(v), 4, seed=7) for v in (x, h))
    source = Affine(truth, normal(4, seed=3) if bias else None)
    got = refit(exactly(x, y), exactly(h, hy), source, kept=kept)
    start = Affine(truth[:, kept], source.bias)
    fits = {p: textbook(x[:, kept], y, start, p) for p in PENALTIES}
    errors = {p: error(h[:, kept], hy, fit) for p, fit in fits.items()}
    assert got.penalty == min(errors, key=errors.get)
    assert got.before == pytest.approx(error(h[:, kept], hy, start), rel=1e-5)
    assert got.after == pytest.approx(min(errors.values()), rel=1e-5)
    assert got.gain == pytest.approx(1 - got.after / got.before)
    both = textbook(torch.cat([x, h])[:, kept], torch.cat([y, hy]), start, got.penalty)
    torch.testing.assert_close(got.linear.weight, both.weight.float(), rtol=1e-5, atol=1e-5)
    assert (got.linear.bias is None) == (source.bias is None)


@pytest.mark.parametrize("bias", [False, True])
def test_with_all_columns_and_its_own_output_a_linear_stays(bias):
    source = Affine(normal(4, 9), normal(4, seed=3) if bias else None)
    x, h = correlated(60, 9), correlated(30, 9, seed=5)
    y, hy = (v @ source.weight.T + (source.bias if bias else 0) for v in (x, h))
    got = refit(accumulated(x, y), accumulated(h, hy), source)
    torch.testing.assert_close(got.linear.weight, source.weight, rtol=1e-6, atol=1e-6)
    if bias:
        torch.testing.assert_close(got.linear.bias, source.bias, rtol=1e-6, atol=1e-6)


@given(st.integers(0, 10_000))
def test_held_out_rows_are_never_worse(seed):
    """Targets that have nothing to do with the inputs: a fit can only learn noise."""
    x, h = correlated(12, 8, seed=seed), correlated(12, 8, seed=seed + 1)
    source = Affine(0.01 * normal(3, 8, seed=seed + 2))
    y, hy = normal(12, 3, seed=seed + 3), normal(12, 3, seed=seed + 4)
    got = refit(exactly(x, y), exactly(h, hy), source)
    assert got.after <= got.before
    assert 0 <= got.gain <= 1
    if got.penalty is None:
        assert got.gain == 0
        assert torch.equal(got.linear.weight, source.weight)


def test_noise_alone_leaves_the_source():
    x, h = correlated(40, 30), correlated(500, 30, seed=5)
    source = Affine(normal(3, 30, seed=2))
    y, hy = (v @ source.weight.T + 10 * normal(len(v), 3, seed=s) for v, s in ((x, 3), (h, 4)))
    got = refit(exactly(x, y), exactly(h, hy), source, penalties=(1e-4,))
    assert got.penalty is None
    assert (got.gain, got.after) == (0, got.before)
    assert torch.equal(got.linear.weight, source.weight)


@pytest.mark.parametrize("bias", [False, True])
def test_columns_that_no_token_drove_keep_their_weights(bias):
    x, h = correlated(60, 9), correlated(30, 9, seed=5)
    x[:, [2, 7]] = h[:, [2, 7]] = 0
    source = Affine(normal(4, 9), normal(4, seed=3) if bias else None)
    got = refit(exactly(x, normal(60, 4) + x[:, :4]), exactly(h, h[:, :4]), source)
    assert got.penalty is not None
    assert got.dead == 2
    assert torch.equal(got.linear.weight[:, [2, 7]], source.weight[:, [2, 7]])


@pytest.mark.parametrize("bias", [False, True])
def test_fewer_tokens_than_columns(bias):
    x, h = normal(5, 40), normal(50, 40, seed=5)
    truth = normal(4, 40, seed=2)
    source = Affine(truth + normal(4, 40, seed=3), normal(4, seed=4) if bias else None)
    got = refit(accumulated(x, x @ truth.T), accumulated(h, h @ truth.T), source)
    assert torch.isfinite(got.linear.weight).all()
    assert got.after <= got.before


def test_a_fit_without_a_solution_is_told():
    x, h = normal(5, 8).repeat(1, 2), normal(50, 16, seed=5)
    source = Affine(normal(4, 16, seed=2))
    got = refit(exactly(x, x[:, :4]), exactly(h, h[:, :4]), source, penalties=(0.0, 1e-3))
    assert got.singular == (0.0,)
    assert got.penalty == 1e-3


def test_without_any_input_the_source_stays():
    source = Affine(normal(4, 6))
    nothing = exactly(torch.zeros(5, 6), normal(5, 4))
    got = refit(nothing, nothing, source)
    assert (got.penalty, got.dead, got.singular) == (None, 6, PENALTIES)
    assert torch.equal(got.linear.weight, source.weight)


def test_held_out_rows_are_asked_for():
    moments, none = exactly(normal(5, 6), normal(5, 4)), exactly(normal(0, 6), normal(0, 4))
    with pytest.raises(DataError, match="no held-out tokens to choose the penalty of a repair by"):
        refit(moments, none, Affine(normal(4, 6)))


@pytest.mark.parametrize("bias", [False, True])
def test_order_and_scale_of_channels_change_nothing(bias):
    x, h, kept = correlated(50, 8), correlated(40, 8, seed=5), torch.tensor([1, 2, 4, 7])
    source = Affine(normal(3, 8, seed=2), normal(3, seed=3) if bias else None)
    y, hy = (v.sin() @ normal(8, 3, seed=6) for v in (x, h))
    want = refit(exactly(x, y), exactly(h, hy), source, kept=kept)
    order = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])
    scale = torch.tensor([1, 256, 1, 0.25, 8, 1, 1, 1 / 64])
    moved = [exactly((v * scale)[:, order], u) for v, u in ((x, y), (h, hy))]
    where = torch.tensor([int((order == c).nonzero()) for c in kept])
    got = refit(*moved, Affine((source.weight / scale)[:, order], source.bias), kept=where)
    assert got.penalty == want.penalty
    torch.testing.assert_close(got.linear.weight * scale[kept], want.linear.weight)
    assert math.isclose(got.gain, want.gain, rel_tol=1e-9)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("few", [(0, 1, 3, 4, 6, 7), tuple(range(9))])
def test_what_lacks_says_as_much_as_the_targets_whatever_is_solved_together(
    bias, few, monkeypatch: pytest.MonkeyPatch
):
    x, h, kept = correlated(60, 9), correlated(30, 9, seed=5), torch.tensor(few)
    source = Affine(normal(7, 9, seed=2), normal(7, seed=3) if bias else None)
    y, hy = (v.sin() @ normal(9, 7, seed=6) for v in (x, h))
    start = Affine(source.weight[:, kept], source.bias)
    fits = {p: textbook(x[:, kept], y, start, p) for p in PENALTIES}
    errors = {p: error(h[:, kept], hy, fit) for p, fit in fits.items()}
    given = [v @ source.weight.T + (source.bias if bias else 0) for v in (x, h)]
    lacks = [exactly(v, u - z) for (v, u), z in zip(((x, y), (h, hy)), given, strict=True)]
    monkeypatch.setattr(ridge_module, "OUTPUTS", 3)
    monkeypatch.setattr(ridge_module, "STRIP", 4)
    got = refit_to_lack(*lacks, source, kept=kept)
    assert got.penalty == min(errors, key=errors.get)
    assert got.before == pytest.approx(error(h[:, kept], hy, start), rel=1e-5)
    assert got.after == pytest.approx(min(errors.values()), rel=1e-5)
    rows = torch.cat([x, h])[:, kept], torch.cat([y, hy])
    want = textbook(*rows, start, got.penalty)
    torch.testing.assert_close(got.linear.weight, want.weight.float(), rtol=1e-5, atol=1e-5)


def test_where_nothing_lacks_nothing_is_solved(monkeypatch: pytest.MonkeyPatch):
    """At zero compression that took as long as the cut of a block."""
    x, source = correlated(60, 9), Affine(normal(4, 9))
    monkeypatch.setattr(torch.linalg, "cholesky_ex", None)
    got = refit_to_lack(*[exactly(x, torch.zeros(60, 4))] * 2, source, kept=torch.arange(9))
    assert (got.penalty, got.before, got.after) == (None, 0, 0)
    assert torch.equal(got.linear.weight, source.weight)
