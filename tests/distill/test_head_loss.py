"""Head and loss in runs of rows against all rows at once by autograd."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, log_softmax

from compress.distill.head import Head, Lesson, head_loss
from compress.distill.losses import NO_LABEL, AllClasses, Objective

N, HIDDEN, VOCAB = 7, 5, 9


class Given:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def of(self, cut: slice) -> AllClasses:
        return AllClasses(self.logits[cut])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def capped(weight: Tensor, bias: Tensor) -> Head:
    """A head that is no plain product: logits are capped, as gemma2's are."""
    return Head(lambda rows: 3 * torch.tanh(linear(rows, weight, bias) / 3), (weight, bias), VOCAB)


def plain_sum(logits: Tensor, teacher: Tensor, lesson: Lesson) -> Tensor:
    """The objective by its definition, differentiable by autograd."""
    log_p, log_q = log_softmax(teacher, -1), log_softmax(logits, -1)
    losses = (log_p.exp() * (log_p - log_q)).sum(-1)
    if lesson.objective.ce:
        assert lesson.labels is not None
        entropy = torch.nn.functional.cross_entropy(
            logits, lesson.labels, reduction="none", ignore_index=NO_LABEL
        )
        losses = torch.lerp(losses, entropy, lesson.objective.ce)
    return losses.sum() if lesson.mask is None else losses[lesson.mask].sum()


@pytest.mark.parametrize("step", [1, 3, 7, 100])
@pytest.mark.parametrize("ce", [0.0, 0.4])
def test_value_and_gradients_are_those_of_all_rows_at_once(step: int, ce: float) -> None:
    hidden, weight, bias = drawn(N, HIDDEN), drawn(VOCAB, HIDDEN, seed=1), drawn(VOCAB, seed=2)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    head, teacher = capped(weight, bias), drawn(N, VOCAB, seed=3)
    labels = torch.tensor([0, 1, 2, NO_LABEL, 4, 5, NO_LABEL])
    mask = torch.tensor([True, True, False, True, True, True, False])
    lesson = Lesson(Given(teacher), Objective("kl", ce), labels, mask)
    expected = plain_sum(head.run(hidden), teacher, lesson)
    value = head_loss(hidden, head, lesson, step)
    torch.testing.assert_close(value, expected)
    found = torch.autograd.grad(2.5 * value, leaves)
    for ours, wanted in zip(found, torch.autograd.grad(2.5 * expected, leaves), strict=True):
        torch.testing.assert_close(ours, wanted)


def test_gradients_pass_gradcheck() -> None:
    shapes = enumerate(((3, 4), (5, 4), (5,), (3, 5)))
    hidden, weight, bias, teacher = (drawn(*shape, seed=i).double() for i, shape in shapes)
    lesson = Lesson(Given(teacher), Objective("jsd"))

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        head = Head(lambda rows: linear(rows, weight, bias), (weight, bias), 5)
        return head_loss(hidden, head, lesson, 2)

    leaves = tuple(x.requires_grad_() for x in (hidden, weight, bias))
    assert torch.autograd.gradcheck(loss, leaves)


def test_frozen_head_gets_no_gradient_and_no_grad_keeps_nothing() -> None:
    hidden, weight = drawn(N, HIDDEN).requires_grad_(), drawn(VOCAB, HIDDEN, seed=1)
    head = Head(lambda rows: linear(rows, weight), (weight,), VOCAB)
    lesson = Lesson(Given(drawn(N, VOCAB, seed=3)), Objective())
    value = head_loss(hidden, head, lesson)
    value.backward()
    assert weight.grad is None
    assert hidden.grad is not None
    with torch.no_grad():
        assert torch.equal(head_loss(hidden, head, lesson), value)


def test_logits_exist_for_one_run_of_rows_only() -> None:
    seen = []
    weight = drawn(VOCAB, HIDDEN).requires_grad_()

    def run(rows: Tensor) -> Tensor:
        seen.append(len(rows))
        return linear(rows, weight)

    lesson = Lesson(Given(drawn(N, VOCAB)), Objective())
    head_loss(drawn(N, HIDDEN), Head(run, (weight,), VOCAB), lesson, 3).backward()
    assert seen == [3, 3, 1]
