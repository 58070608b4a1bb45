"""Rates of steps are those of transformers; the peak falls with the damage and the width."""

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup

from compress.distill.optimizer import (
    OPTIMIZERS,
    OptimizerName,
    load_state_tensors,
    make,
    state_tensors,
)
from compress.distill.schedule import ScheduleName, by_rows, highest_rate, rate_for, rates


def test_cosine_is_that_of_transformers_without_its_zeros() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, 3, 41)
    plain = []
    for _ in range(40):
        optimizer.step()
        schedule.step()
        plain.append(schedule.get_last_lr()[0])
    assert rates("cosine", 40) == pytest.approx(plain)


@pytest.mark.parametrize("name", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 100])
def test_rates_rise_to_the_peak_and_fall(name: ScheduleName, steps: int) -> None:
    found = rates(name, steps)
    assert len(found) == steps
    assert all(0 < rate <= 1 for rate in found)
    top = found.index(max(found))
    assert list(found[: top + 1]) == sorted(found[: top + 1])
    assert list(found[top:]) == sorted(found[top:], reverse=True)
    if steps == 100:
        assert max(found) == 1
        assert found[-1] < 0.2
        assert found.count(1.0) == (66 if name == "wsd" else 1)


def test_peak_follows_damage_and_width() -> None:
    """Never more than at full damage, and never nothing."""
    assert rate_for(9.0, 256) == rate_for(0.5, 256) > rate_for(0.1, 256) >= rate_for(0.01, 256) > 0
    assert rate_for(0.2, 4096) == pytest.approx(rate_for(0.2, 256) / 16)
    assert by_rows(16) == 1
    assert by_rows(4) == by_rows(64) / 4
    assert rate_for(float("inf"), 256) == rate_for(9.0, 256) == highest_rate(256)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_goes_on_from_its_tensors(name: OptimizerName) -> None:
    """To the bit, with a matrix and a vector."""
    drawn = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(4, 3, generator=drawn), "b": torch.randn(3, generator=drawn)}
    gradients = [
        {key: torch.randn(x.shape, generator=drawn) for key, x in start.items()} for _ in range(4)
    ]

    def moved(
        parameters: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, step: int
    ) -> None:
        for key, gradient in gradients[step].items():
            parameters[key].grad = gradient.clone()
        optimizer.step()

    whole = {key: x.clone().requires_grad_() for key, x in start.items()}
    optimizer = make(name, whole, 0.1, ["w"])
    for step in range(4):
        if step == 2:
            half = {key: x.detach().clone().requires_grad_() for key, x in whole.items()}
            other = make(name, half, 0.1, ["w"])
            kept = {key: value.clone() for key, value in state_tensors(optimizer).items()}
            load_state_tensors(other, kept)
        moved(whole, optimizer, step)
        if step >= 2:
            moved(half, other, step)
    assert all(torch.equal(whole[key], half[key]) for key in start)
