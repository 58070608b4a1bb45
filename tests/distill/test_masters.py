"""Parameters of 16 bits are trained as if they had 32, and rounded for the student alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.distill.loop import Learned, Training, train
from compress.distill.losses import Objective
from compress.distill.masters import Masters
from compress.distill.model import ModelScope
from compress.distill.optimizer import OptimizerName
from compress.distill.rows import TokenRows, split
from compress.distill.state import State, read_state, write_state
from compress.distill.teacher import ResidentTeacher
from compress.distill.trained import whole
from distill.conftest import Pair

SLOW = Training(steps=12, batch=6, micro=4, rate=2e-4, every=4)


def test_steps_below_a_parameters_precision_add_up() -> None:
    """Of 1 a number of 8 significant bits knows no less than 2^-8 beside it."""
    low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    masters = Masters.of({"w": low})
    optimizer = torch.optim.SGD(masters.weights.values(), lr=2.0**-12)
    for _ in range(64):
        masters.clear()
        for _ in range(2):  # two parts of a batch
            low.sum().backward()
            masters.gather()
        assert low.grad is None
        optimizer.step()
        masters.spread()
    assert masters.weights["w"].tolist() == [1 - 2.0**-5] * 3
    assert low.tolist() == [1 - 2.0**-5] * 3


def test_wide_parameters_are_their_own() -> None:
    wide = nn.Parameter(torch.ones(3))
    masters = Masters.of({"w": wide})
    assert masters.weights["w"] is wide
    wide.sum().backward()
    masters.gather()
    masters.spread()
    assert wide.grad is not None


def course(pair: Pair, rows: TokenRows, dtype: torch.dtype) -> ModelScope:
    student, teacher = pair.student(0.05), pair.teacher()
    for each in (student, teacher):
        each.model.to(dtype)
    learn, held = split(rows, 6, 0)
    trained = whole(student.model, student.names)
    return ModelScope(student, trained, ResidentTeacher(teacher), learn, held, Objective())


def test_a_student_in_bf16_learns_what_one_in_fp32_learns(pair: Pair, rows: TokenRows) -> None:
    found: dict[torch.dtype, Learned] = {
        dtype: train(course(pair, rows, dtype), SLOW, torch.float32)
        for dtype in (torch.float32, torch.bfloat16)
    }
    gains = {dtype: each.start - each.end for dtype, each in found.items()}
    assert gains[torch.float32] > 0
    assert gains[torch.bfloat16] == pytest.approx(gains[torch.float32], rel=0.2)
    # What was learned is finer than what the student computed with.
    assert any((x != x.bfloat16().float()).any() for x in found[torch.bfloat16].weights.values())


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
def test_a_killed_training_in_bf16_resumes_to_the_same_bits(
    pair: Pair, rows: TokenRows, tmp_path: Path, optimizer: OptimizerName
) -> None:
    training = replace(SLOW, steps=3, every=2, optimizer=optimizer)
    wanted = train(course(pair, rows, torch.bfloat16), training, torch.bfloat16)
    path = tmp_path / "state.safetensors"

    def save(state: State) -> None:
        write_state(path, state)
        if state.standing.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(course(pair, rows, torch.bfloat16), training, torch.bfloat16, save=save)
    kept = read_state(path)
    found = train(course(pair, rows, torch.bfloat16), training, torch.bfloat16, kept)
    assert found.weights.keys() == wanted.weights.keys()
    assert all(torch.equal(found.weights[name], wanted.weights[name]) for name in found.weights)
