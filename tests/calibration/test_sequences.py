"""Aggregates over sequences equal their definition and leave padding out."""

import pytest
import torch

from compress.errors import DataError
from compress_calibration.sequences import SequenceAccumulator

X = torch.randn(5, 8, 3, generator=torch.Generator().manual_seed(0)) + 1
OVER = {
    "mean": lambda x, dim: x.abs().mean(dim),
    "l2": lambda x, dim: x.square().sum(dim).sqrt(),
    "variance": lambda x, dim: x.var(dim, correction=0),
}


@pytest.mark.parametrize("batch", OVER)
@pytest.mark.parametrize("sequence", OVER)
def test_both_aggregates_are_those_of_the_paper(sequence, batch):
    sums = SequenceAccumulator.create("down", 3, by=(sequence, batch))
    sums.add(X[:2])
    sums.add(X[2:])
    want = OVER[batch](OVER[sequence](X.double(), 1), 0)
    torch.testing.assert_close(sums.aggregate(), want, rtol=1e-5, atol=1e-6)


def test_padding_is_left_out():
    mask = torch.ones(5, 8, dtype=torch.bool)
    mask[1, 3:] = mask[4] = False
    padded, plain = (SequenceAccumulator.create("down", 3) for _ in range(2))
    padded.add(X, mask)
    for row in (X[:1], X[1:2, :3], X[2:4]):
        plain.add(row)
    assert padded.sequences == 4
    assert torch.equal(padded.aggregate(), plain.aggregate())


def test_values_that_are_not_finite_are_named():
    bad = X.clone()
    bad[1, 2, 2] = float("nan")
    sums = SequenceAccumulator.create("down", 3)
    sums.add(bad)
    with pytest.raises(DataError, match=r"of down are not finite in 1 of 3 features \(first: 2\)"):
        sums.aggregate()


def test_nothing_seen_is_told():
    with pytest.raises(DataError, match="no calibration sequence reached the inputs of down"):
        SequenceAccumulator.create("down", 3).aggregate()
