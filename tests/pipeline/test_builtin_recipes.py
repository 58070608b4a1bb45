"""Every recipe that comes along does what its header says, on the embedded model."""

import re
from pathlib import Path

import pytest

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.pipeline import make_plan, run
from compress.recipe import builtin, builtin_names, load

# Few tokens: what is tried is that the recipe runs and what it stores, not how well it does.
FEW = ("calibration.samples=8", "calibration.length=64")
NONE = ("evaluation=null",)


@pytest.mark.parametrize("name", builtin_names())
def test_it_runs_and_is_as_large_as_its_header_says(
    name: str, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    overrides = (*(FEW if load(name).calibration else ()), *NONE)
    report = run(name, demo_model, tmp_path / "out", overrides=overrides)
    said = re.search(r"12\.3 -> ([\d.]+) MB", builtin(name).text)
    assert said is not None
    assert report.result.bytes / 1e6 == pytest.approx(float(said[1]), abs=0.006)
    compressed = [layer for layer in report.layers if layer.skipped_reason is None]
    assert len(compressed) == 42
    assert all(layer.error is not None and layer.error < 0.2 for layer in compressed)
    weights = open_weights(Checkpoint.open(tmp_path / "out"))
    assert weights.spec.family == "llama"


@pytest.mark.parametrize("name", builtin_names())
def test_some_runtime_takes_its_result(name: str, demo_model: Path) -> None:
    plan = make_plan(name, demo_model)
    assert plan.problems == ()
    assert any(verdict.verdict != "no" for verdict in plan.runtimes)
