"""Divergences against their definitions in fp64, and their gradients against autograd's."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from compress.distill.losses import (
    DIVERGENCES,
    NO_LABEL,
    AllClasses,
    ChosenClasses,
    Divergence,
    Objective,
    block_output_losses,
    choose,
    row_losses,
)


def _plain_kl(p: Tensor, q: Tensor) -> Tensor:
    return kl_div(q.log(), p, reduction="none").sum(-1)


def _plain(name: str, log_q: Tensor, log_p: Tensor) -> Tensor:
    p, q = log_p.exp(), log_q.exp()
    if name == "jsd":
        return (_plain_kl(p, (p + q) / 2) + _plain_kl(q, (p + q) / 2)) / 2
    return _plain_kl(p, q) if name == "kl" else _plain_kl(q, p)


def _drawn(rows: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    first, second = (2 * torch.randn(rows, classes, generator=noise) for _ in range(2))
    return first, second


@pytest.mark.parametrize(("name", "divergence"), DIVERGENCES.items())
def test_divergence_and_gradient_are_those_of_the_definition(
    name: str, divergence: Divergence
) -> None:
    student, teacher = (x.double() for x in _drawn(5, 7))
    student.requires_grad_()
    expected = _plain(name, log_softmax(student, -1), log_softmax(teacher, -1))
    value, gradient = divergence(log_softmax(student.detach(), -1), log_softmax(teacher, -1))
    torch.testing.assert_close(value, expected.detach())
    (by_autograd,) = torch.autograd.grad(expected.sum(), student)
    torch.testing.assert_close(gradient, by_autograd)


@pytest.mark.parametrize("divergence", DIVERGENCES.values())
def test_equal_distributions_differ_by_nothing(divergence: Divergence) -> None:
    log_p = log_softmax(_drawn(4, 9)[0], -1)
    value, gradient = divergence(log_p, log_p)
    assert value.abs().max() < 1e-6
    assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("name", ["kl", "jsd"])
def test_class_that_the_teacher_holds_impossible_counts_as_its_limit(name: str) -> None:
    student, teacher = _drawn(3, 6)
    teacher[:, 2] = float("-inf")
    value, gradient = DIVERGENCES[name](log_softmax(student, -1), log_softmax(teacher, -1))
    teacher[:, 2] = -80.0
    near, slope = DIVERGENCES[name](log_softmax(student, -1), log_softmax(teacher, -1))
    torch.testing.assert_close(value, near)
    torch.testing.assert_close(gradient, slope)


@pytest.mark.parametrize("divergence", DIVERGENCES.values())
def test_all_tokens_chosen_is_the_full_divergence(divergence: Divergence) -> None:
    student, teacher = _drawn(4, 11)
    full = AllClasses(teacher).against(student, divergence)
    chosen = choose(teacher, 11, 11).against(student, divergence)
    for ours, expected in zip(chosen, full, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("divergence", DIVERGENCES.values())
def test_uniform_rest_is_exact(divergence: Divergence) -> None:
    """Where both spread the rest evenly over its tokens, one class for it loses nothing."""
    student, teacher = _drawn(4, 40)
    kept = choose(teacher, 6, 40)
    behind = torch.ones_like(teacher, dtype=torch.bool).scatter_(1, kept.ids, False)
    student[behind], teacher[behind] = -1.0, -2.0
    kept = choose(teacher, 6, 40)
    expected, slope = AllClasses(teacher).against(student, divergence)
    value, gradient = kept.against(student, divergence)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient, slope)


@pytest.mark.parametrize("divergence", DIVERGENCES.values())
def test_gradient_over_chosen_tokens_is_that_of_their_value(divergence: Divergence) -> None:
    student, teacher = _drawn(3, 12)
    kept = choose(teacher, 4, 12)
    step = 1e-2 * _drawn(3, 12, seed=1)[0]
    above, below = (kept.against(student + s * step, divergence)[0] for s in (1, -1))
    slope = (kept.against(student, divergence)[1] * step).sum(-1)
    torch.testing.assert_close((above - below) / 2, slope, rtol=2e-3, atol=1e-6)


def test_chosen_tokens_hold_less_of_the_divergence_the_fewer_they_are() -> None:
    """Joining classes never raises a divergence (data processing)."""
    student, teacher = _drawn(6, 50)
    kl = DIVERGENCES["kl"]
    values = [choose(teacher, k, 50).against(student, kl)[0] for k in (1, 4, 16, 50)]
    for fewer, more in pairwise(values):
        assert (fewer <= more + 1e-6).all()


def test_mass_of_the_rest_is_exact() -> None:
    teacher = _drawn(5, 30)[0]
    kept = choose(teacher, 3, 30)
    torch.testing.assert_close(kept.log_probs.exp().sum(-1) + kept.rest.exp(), torch.ones(5))


@pytest.mark.parametrize("wider", ["student", "teacher"])
def test_padding_of_the_wider_vocabulary_takes_no_part(wider: str) -> None:
    student, teacher = _drawn(3, 10)
    expected, slope = AllClasses(teacher).against(student, DIVERGENCES["kl"])
    junk = torch.full((3, 2), 5.0)
    if wider == "student":
        student, slope = torch.cat([student, junk], 1), torch.cat([slope, torch.zeros(3, 2)], 1)
    else:
        teacher = torch.cat([teacher, junk], 1)
    value, gradient = AllClasses(teacher).against(student, DIVERGENCES["kl"])
    assert torch.equal(value, expected)
    assert torch.equal(gradient, slope)
    kept = choose(teacher, 4, 10)
    assert kept.against(student, DIVERGENCES["kl"])[1].shape == student.shape


def test_cross_entropy_is_mixed_in_where_the_next_token_is_known() -> None:
    student, teacher = _drawn(4, 8)
    labels = torch.tensor([3, NO_LABEL, 0, 7])
    student.requires_grad_()
    expected = 0.75 * _plain("kl", log_softmax(student, -1), log_softmax(teacher, -1))
    expected = expected + 0.25 * cross_entropy(
        student, labels, reduction="none", ignore_index=NO_LABEL
    )
    value, gradient = row_losses(
        student.detach(), AllClasses(teacher), labels, Objective("kl", 0.25)
    )
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), student)[0])


def test_fp16_log_probs_are_normalised_again() -> None:
    student, teacher = _drawn(5, 20)
    kept = choose(teacher, 5, 20)
    stored = ChosenClasses(kept.ids, kept.log_probs.half().float(), kept.rest, 20)
    value = stored.against(student, DIVERGENCES["kl"])[0]
    torch.testing.assert_close(
        value, kept.against(student, DIVERGENCES["kl"])[0], rtol=5e-3, atol=1e-3
    )


def test_block_outputs_are_balanced_by_size() -> None:
    ours, theirs = _drawn(4, 6)
    plain = block_output_losses([ours, ours], [theirs, theirs])
    size = torch.tensor([1.0, 10.0, 100.0, 1e3]).unsqueeze(-1)
    found = block_output_losses([ours, size * ours], [theirs, size * theirs])
    torch.testing.assert_close(found, plain)
    expected = (ours - theirs).square().sum(-1) / theirs.square().sum(-1)
    torch.testing.assert_close(plain, expected)
