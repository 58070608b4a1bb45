"""The benchmark of what is outside of compiled code: its parts are those of a step; the bar."""

from pathlib import Path

import pytest

from benchmarks.processes import stored_result
from benchmarks.runtime import outside
from compress_kernels.cpu.library import native
from helpers import tiny_models


@pytest.mark.skipif(native().library is None, reason=native().reason)
def test_parts_are_those_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "OUTPUT", 6)
    monkeypatch.setattr(outside, "ROUNDS", 2)
    model = tiny_models.make("llama", tmp_path, dtype="fp32")
    tiny_models.write_tokenizer(model)
    found = outside.measured(model, [1, 3])
    for parts in found["texts"].values():
        assert 0 < parts["one call"]["median_us"] < parts["step"]["median_us"]
        assert 0 < parts["share"] < 1


def test_figures_are_of_steps() -> None:
    found = outside.figures([(10.0 + i, 8.0) for i in range(11)])
    assert found["step"] == {"tenth_us": 10.2, "median_us": 15.0}
    assert found["outside"]["median_us"] == 7.0
    assert found["share"] == round(7 / 15, 4)


def test_a_tenth_of_a_step_at_most() -> None:
    """Of one text on the embedded model."""
    one, *_ = stored_result("runtime_outside")["models"]
    assert one["model"] == "tale-6m"
    assert one["texts"]["1"]["share"] <= 0.10
