"""Which rows a step takes, and what follows a token."""

import torch

from compress.distill.losses import NO_LABEL
from compress.distill.rows import Order, TokenRows, all_rows, split


def test_a_step_is_known_without_those_before_it() -> None:
    order, other = Order(7, 3, seed=5), Order(7, 3, seed=5)
    steps = [order.at(step) for step in range(12)]
    for step in (11, 4, 0, 5):
        assert torch.equal(other.at(step), steps[step])


def test_every_epoch_takes_every_row_once_in_another_order() -> None:
    order = Order(7, 3, seed=5)
    drawn = torch.cat([order.at(step) for step in range(7)]).view(3, 7)
    assert torch.equal(drawn.sort().values, torch.arange(7).expand(3, 7))
    assert len({tuple(epoch) for epoch in drawn.tolist()}) == 3
    assert not torch.equal(Order(7, 7, seed=6).at(0), drawn[0])


def test_a_step_may_be_longer_than_an_epoch() -> None:
    assert torch.equal(Order(2, 5, seed=0).at(0)[:4].sort().values, torch.tensor([0, 0, 1, 1]))


def test_held_out_rows_are_apart() -> None:
    rows = all_rows(torch.arange(20).view(10, 2))
    learn, held = split(rows, 3, seed=1)
    assert torch.equal(torch.cat([learn.index, held.index]).sort().values, torch.arange(10))
    assert torch.equal(learn.ids, rows.ids[learn.index])
    assert not torch.equal(split(rows, 3, seed=2)[1].index, held.index)


def test_labels_are_the_next_real_tokens() -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    rows = TokenRows(ids, mask, torch.arange(2))
    no = NO_LABEL
    assert rows.labels().tolist() == [6, 7, no, 9, no, no]
    assert all_rows(ids).labels().tolist() == [6, 7, no, 9, 0, no]
    assert [len(part.ids) for part in all_rows(ids[[0, 1, 0]]).parts(2)] == [2, 1]
