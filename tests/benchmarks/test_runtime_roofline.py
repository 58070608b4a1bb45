"""The benchmark of predictions: its figures, and both sides of them on a tiny model."""

import time
from pathlib import Path

import pytest
import torch

from benchmarks.runtime import roofline
from benchmarks.runtime.roofline import Case, compare, figures
from benchmarks.runtime.sides import Ours
from compress.speed import hollow as hollow_module
from compress.speed import rates as rates_module
from compress.speed import timer as timer_module
from helpers import tiny_models


def test_a_step_is_one_in_which_every_text_gets_a_token() -> None:
    times = [[1.0, 2.0, 4.0, 7.0, 11.0, 30.0], [4.0, 7.0, 11.0, 20.0]]
    found = figures(times)
    assert found == {"first_token_p50_s": 1.0, "step_s": 3.5, "whole_s": 30.0}
    assert figures([[2.0]]) == {"first_token_p50_s": 2.0}


def test_outputs_last_behind_the_last_prompt() -> None:
    assert roofline._at_once(1) == Case(1, 64, 18)
    assert roofline._at_once(64) == Case(64, 64, 25)


def test_of_each_figure_the_middle_turn_is_kept() -> None:
    turns = [
        {"batch": 1, "step_s": {"measured": x, "ratio": r}, "whole_s": {"measured": x, "ratio": -r}}
        for x, r in ((1.0, 0.9), (2.0, 0.7), (3.0, 1.2))
    ]
    found = roofline.middle(turns)
    assert found["batch"] == 1
    assert (found["step_s"]["measured"], found["whole_s"]["measured"]) == (1.0, 1.0)
    assert roofline.middle(turns[1:])["step_s"]["measured"] == 2.0


def test_every_figure_is_predicted_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_module, "READ_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(timer_module, "SIDES", {"cpu": 64})
    monkeypatch.setattr(timer_module, "RUNS", 1)
    monkeypatch.setattr(hollow_module, "ALL_PIECES", 1 << 20)
    monkeypatch.setattr(rates_module, "BURST", 0.0)
    monkeypatch.setattr(roofline, "ROUNDS", 1)
    model = tiny_models.make("llama", tmp_path, dtype="fp32", vocab_size=4096)
    asked = [Case(2, 16, 4), Case(1, 40, 1)]
    _, (together, alone) = compare(Ours(model, torch.float32), asked, time.perf_counter)
    assert {"batch", "first_token_p50_s", "step_s", "whole_s", "step_at_best_s"} <= set(together)
    assert set(alone) == {"batch", "prompt", "output", "first_token_p50_s", "first_token_at_best_s"}
    for case in (together, alone):
        for value in case.values():
            if isinstance(value, dict):
                ratio = value["expected"] / value["measured"]
                assert value["ratio"] == pytest.approx(ratio, rel=1e-2, abs=6e-4)  # three digits
