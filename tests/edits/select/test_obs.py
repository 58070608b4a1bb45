"""Structured OBS removes, at every step, what the best refit of the rest can best do without."""

import pytest
import torch

from compress.edits.select.groups import Groups
from compress.edits.select.obs import removals, select
from compress.errors import DataError

SHAPES = [
    pytest.param(24, Groups(), 16, id="channels"),
    pytest.param(24, Groups(width=4), 4, id="heads"),
    pytest.param(24, Groups(width=2, pools=3), 6, id="heads in KV groups"),
    pytest.param(24, Groups(pools=4), 12, id="channels in pools"),
]


def problem(columns, outputs=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(60, columns, generator=g) @ torch.randn(columns, columns, generator=g)
    return (x.T @ x).double(), torch.randn(outputs, columns, generator=g)


def damped(gram, damping):
    return gram + damping * gram.diagonal().diag()


def least_error(gram, weight, groups, gone):
    """Squared error of the best linear without some groups, all its columns refitted."""
    stays = torch.ones(len(gram) // groups.width, dtype=torch.bool)
    stays[list(gone)] = False
    kept = groups.columns(stays.nonzero().flatten())
    weight = weight.double()
    fit = torch.linalg.solve(gram[kept][:, kept], gram[kept] @ weight.T).T
    lost = weight.index_add(1, kept, fit, alpha=-1)
    return float((lost @ gram * lost).sum())


def one_by_one(gram, weight, remove, groups):
    """The greedy order by brute force: a refit for every group that could go."""
    count, order, errors = groups.count(len(gram)), [], [0.0]
    quota = [remove // groups.pools] * groups.pools
    for _ in range(remove):
        free = [g for g in range(count) if g not in order and quota[g * groups.pools // count]]
        tried = {g: least_error(gram, weight, groups, [*order, g]) for g in free}
        order.append(min(tried, key=tried.__getitem__))
        errors.append(tried[order[-1]])
        quota[order[-1] * groups.pools // count] -= 1
    return order, torch.tensor(errors, dtype=torch.float64).diff()


@pytest.mark.parametrize("damping", [0.01, 1e-6])
@pytest.mark.parametrize(("columns", "groups", "remove"), SHAPES)
def test_every_step_is_the_best_by_brute_force(columns, groups, remove, damping):
    gram, weight = problem(columns)
    order, rise = one_by_one(damped(gram, damping), weight, remove, groups)
    got = removals(gram, weight, remove, groups, damping=damping)
    assert got.order.tolist() == order
    torch.testing.assert_close(got.rise, rise, rtol=1e-7, atol=1e-9 * float(rise.max()))


@pytest.mark.parametrize("block", [1, 3, 7])
@pytest.mark.parametrize(("columns", "groups", "remove"), SHAPES)
def test_delayed_updates_change_nothing(columns, groups, remove, block):
    gram, weight = problem(columns, seed=1)
    at_once = removals(gram, weight, remove, groups, block=1)
    delayed = removals(gram, weight, remove, groups, block=block)
    assert torch.equal(delayed.order, at_once.order)
    torch.testing.assert_close(delayed.rise, at_once.rise, rtol=1e-10, atol=0)


def test_strips_of_a_wide_matrix(monkeypatch):
    gram, weight = problem(24)
    want = removals(gram, weight, 16)
    monkeypatch.setattr("compress.edits.select.obs.STRIP", 5)
    got = removals(gram, weight, 16, block=4)
    assert torch.equal(got.order, want.order)
    torch.testing.assert_close(got.rise, want.rise, rtol=1e-10, atol=0)
    heads = Groups(width=4)  # strips of one head each
    split = removals(gram, weight, 4, heads)
    monkeypatch.undo()
    torch.testing.assert_close(
        split.rise, removals(gram, weight, 4, heads).rise, rtol=1e-10, atol=0
    )


def hard(kind, columns=96):
    g = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    x = {
        "few tokens": lambda: normal(columns // 4, columns),
        "copies": lambda: normal(400, columns // 2).repeat(1, 2) + 1e-3 * normal(400, columns),
        "one direction": lambda: 0.1 * normal(400, columns) + 10 * normal(400, 1),
        "scales": lambda: (
            normal(400, 12) @ normal(12, columns) * 10 ** (6 * torch.rand(columns, generator=g) - 3)
        ),
    }[kind]()
    return (x.double().T @ x.double()), normal(24, columns) / x.std(0)


@pytest.mark.parametrize("damping", [0.01, 1e-4])
@pytest.mark.parametrize("kind", ["few tokens", "copies", "one direction", "scales"])
def test_fp32_grams_lose_the_same_channels(kind, damping):
    gram, weight = hard(kind)
    exact, single = (removals(g, weight, 32, damping=damping) for g in (gram, gram.float()))
    assert set(exact.order.tolist()) == set(single.order.tolist())
    torch.testing.assert_close(single.rise.sum(), exact.rise.sum(), rtol=1e-4, atol=0)


def test_what_stays_is_what_did_not_go():
    gram, weight = problem(24)
    stays = select(gram, weight, 8)
    gone = removals(gram, weight, 16).order
    assert stays.tolist() == sorted(set(range(24)) - set(gone.tolist()))
    assert stays.dtype == torch.int64
    assert select(gram, weight, 24).tolist() == list(range(24))


def test_every_pool_keeps_as_many():
    gram, weight = problem(24)
    weight[:, :8] *= 1e-3  # the first pool is worth least, and still keeps its share
    stays = select(gram, weight, 6, Groups(width=2, pools=3))
    assert (stays // 4).bincount().tolist() == [2, 2, 2]


def test_order_and_scale_of_channels_change_nothing():
    gram, weight = problem(24)
    want = removals(gram, weight, 16)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3))
    scale = 2.0 ** (torch.arange(24) % 17 - 8)
    moved = (gram * scale * scale[:, None])[order][:, order]
    got = removals(moved, (weight / scale)[:, order], 16)
    assert order[got.order].tolist() == want.order.tolist()
    torch.testing.assert_close(got.rise, want.rise, rtol=1e-7, atol=0)


def test_copies_of_a_channel_go_first_and_cost_nothing():
    """Magnitudes and activations would keep both: OBS sees that one can stand for the other."""
    gram, weight = problem(12)
    double = torch.cat([torch.arange(12), torch.tensor([3, 8])])
    got = removals(gram[double][:, double], 0.5 * weight[:, double], 2, damping=1e-9)
    assert {int(double[c]) for c in got.order} == {3, 8}
    assert float(got.rise.sum()) < 1e-6 * float(removals(gram, weight, 2).rise.sum())


def test_channels_that_no_token_drove_go_first():
    gram, weight = problem(12)
    gram[[2, 7]] = 0
    gram[:, [2, 7]] = 0
    got = removals(gram, weight, 3)
    assert set(got.order[:2].tolist()) == {2, 7}
    assert torch.isfinite(got.rise).all()


def test_a_gram_without_an_inverse_is_refused():
    gram, weight = problem(4)
    gram[:] = 1
    message = "a gram has no inverse with a damping of 0; take a greater one"
    with pytest.raises(DataError, match=message):
        removals(gram, weight, 1, damping=0)
