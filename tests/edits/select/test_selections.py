"""Every selection keeps what its paper's score says, for channels, heads and pools alike."""

from dataclasses import replace

import pytest
import torch

from compress.edits.select import SELECTIONS, activation, contribution, fluctuation, taylor
from compress.edits.select.evidence import Evidence
from compress.edits.select.groups import Groups
from compress_calibration.moments import MomentsAccumulator
from compress_calibration.sequences import SequenceAccumulator

K, N = 12, 5
HEADS = Groups(width=3)
SHAPES = [Groups(), HEADS, Groups(width=2, pools=3)]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = normal(4, 10, K) * torch.arange(1, K + 1) + torch.arange(K)  # [sequences, tokens, K]


def seen(x=X):
    weight, producers = normal(N, K, seed=1), (normal(K, 7, seed=2), normal(K, 7, seed=3))
    tokens = x.flatten(0, 1)
    moments = MomentsAccumulator.create("down", K, N)
    moments.add(tokens, tokens @ weight.T)
    sequences = SequenceAccumulator.create("down", K)
    sequences.add(x)
    changes = tuple(normal(K, seed=4 + i) for i in range(3))
    return Evidence(weight, producers, moments.moments(), sequences, changes)


@pytest.mark.parametrize("groups", SHAPES, ids=str)
@pytest.mark.parametrize("name", SELECTIONS)
def test_as_many_of_every_pool_stay(name, groups):
    count = K // groups.width
    for keep in range(groups.pools, count + 1, groups.pools):
        kept = SELECTIONS[name].choose(seen(), groups, keep)
        assert kept.dtype == torch.int64
        assert kept.tolist() == sorted(set(kept.tolist()))
        pools = (kept * groups.pools // count).bincount(minlength=groups.pools)
        assert pools.tolist() == [keep // groups.pools] * groups.pools


@pytest.mark.parametrize("groups", SHAPES, ids=str)
@pytest.mark.parametrize("name", SELECTIONS)
def test_what_gives_nothing_goes(name, groups):
    """The last group of each pool has neither input nor weight."""
    count = K // groups.width
    last = torch.arange(1, groups.pools + 1) * (count // groups.pools) - 1
    gone = groups.columns(last)
    x = X.clone()
    x[..., gone] = 0
    given = seen(x)
    given.weight[:, gone] = 0
    for each in (*given.producers, *given.changes):
        each[gone] = 0
    kept = SELECTIONS[name].choose(given, groups, count - groups.pools)
    assert set(kept.tolist()) == set(range(count)) - set(last.tolist())


@pytest.mark.parametrize("name", SELECTIONS)
def test_only_what_is_wanted_is_looked_at(name):
    """Beside weights, which are always there."""
    wanted, given = SELECTIONS[name].wants, seen()
    less = replace(
        given,
        producers=given.producers if "producers" in wanted else (),
        moments=given.moments if "moments" in wanted else None,
        sequences=given.sequences if "sequences" in wanted else None,
        changes=given.changes if "gradients" in wanted else (),
    )
    choose = SELECTIONS[name].choose
    assert torch.equal(choose(less, HEADS, 2), choose(given, HEADS, 2))


def test_activation_is_the_norm_over_sequences_of_mean_sizes():
    want = X.abs().mean(1).square().sum(0).sqrt().double()
    torch.testing.assert_close(activation.scores(seen(), Groups()), want, rtol=1e-6, atol=0)
    heads = want.view(4, 3).square().sum(1).sqrt()
    torch.testing.assert_close(activation.scores(seen(), HEADS), heads, rtol=1e-6, atol=0)


def test_contribution_is_the_size_of_a_groups_output():
    given = seen()
    parts = X.flatten(0, 1).view(-1, 4, 3), given.weight.view(N, 4, 3)
    want = torch.einsum("tgi,ngi->gtn", *parts).flatten(1).norm(dim=1).double()
    torch.testing.assert_close(contribution.scores(given, HEADS), want, rtol=1e-5, atol=0)


def test_a_channel_contributes_its_rms_times_its_column():
    given = seen()
    want = X.flatten(0, 1).square().sum(0).sqrt() * given.weight.norm(dim=0)
    got = contribution.scores(given, Groups())
    torch.testing.assert_close(got, want.double(), rtol=1e-5, atol=0)


def test_magnitude_counts_all_weights_of_a_group():
    given = seen()
    heads = [w.reshape(4, -1) for w in (given.weight.T, *given.producers)]
    want = torch.cat(heads, dim=1).norm(dim=1)
    kept = SELECTIONS["magnitude"].choose(given, HEADS, 2)
    assert kept.tolist() == want.topk(2).indices.sort().values.tolist()


def test_taylor_is_the_change_of_loss():
    """A loss that is linear in the weights changes by just that when a row goes."""
    weight, gradient = normal(K, 7, seed=2), normal(K, 7, seed=5)

    def loss(weight):
        return float((weight.double() * gradient.double()).sum())

    for channel, change in enumerate(taylor.change_of_loss(weight, gradient)):
        without = weight.clone()
        without[channel] = 0
        assert float(change) == pytest.approx(loss(weight) - loss(without), rel=1e-6)


def test_taylor_adds_the_sizes_of_what_each_matrix_says():
    given = replace(seen(), changes=(normal(K, seed=1), -3 * normal(K, seed=2)))
    want = sum(part.abs() for part in given.changes)
    torch.testing.assert_close(taylor.scores(given, Groups()), want)


def test_fluctuation_looks_past_the_mean():
    """A channel that is large and hardly varies is worth little."""
    x = X.clone()
    x[..., 3] = 1000 + 1e-2 * normal(4, 10, seed=9)
    given = seen(x)
    want = x.flatten(0, 1).double().var(0, correction=0) * given.weight.double().square().sum(0)
    got = fluctuation.scores(given, Groups())
    torch.testing.assert_close(got[4:], want[4:], rtol=1e-4, atol=0)
    assert int(got.argmin()) == 3
    assert int(contribution.scores(given, Groups()).argmax()) == 3
