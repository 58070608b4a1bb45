"""Trackers get the report's numbers through one hook, once, with finite numbers alone."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import compress
from compress.errors import DependencyError, OutputError
from compress.report.records.quality import Quality, TaskNumber, TaskQuality, TextQuality
from compress.report.schema import Course
from compress.sharing import trackers
from compress.sharing.metrics import LossCurve, RunMetrics, metrics_of
from compress.sharing.share import Share
from helpers.short_runs import RTN, recipe

PLAIN = {"evaluation": None}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, tiny) -> compress.Report:
    """Of a run, with a quality and a training that it did not have."""
    out = tmp_path_factory.mktemp("run") / "out"
    found = compress.run(recipe(RTN, **PLAIN), tiny("llama"), out)
    text = TextQuality("held/out (a)", 9, 8.0, 9.0, 0.25, math.nan)
    task = TaskQuality("multiple_choice", 4, 0, {"acc": TaskNumber(0.5, source=0.75)})
    course = Course("model", 2.0, 1.0, "steps", (0, 5), (0, 9), (None, 1.5), (2.0, 1.0), (0.0, 0.1))
    stage = replace(found.stages[0], courses=(course,))
    quality = Quality((text,), {"copa": task})
    return replace(found, quality=quality, stages=(stage, *found.stages[1:]))


@pytest.fixture
def metrics(report: compress.Report) -> RunMetrics:
    return metrics_of(report, Path(report.result.path) / "report")


def test_the_numbers_of_a_report(report: compress.Report, metrics: RunMetrics) -> None:
    assert metrics.values["size"] == report.result.bytes
    assert metrics.values["held/out _a_/perplexity"] == 9.0
    assert metrics.values["held/out _a_/kl"] == 0.25
    assert metrics.values["copa/acc_before"] == 0.75
    assert not [name for name in metrics.values if "agreement" in name]  # it was no number
    assert all(math.isfinite(value) for value in metrics.values.values())
    name = report.stages[0].name
    assert metrics.curves == (
        LossCurve(f"{name}/model/held_out", (0, 5), (2.0, 1.0)),
        LossCurve(f"{name}/model/loss", (5,), (1.5,)),
    )
    assert {file.name for file in metrics.files} == {"report.json", "report.html"}
    assert metrics.settings["source_sha256"] == report.source.sha256


def test_a_function_gets_them(tiny, tmp_path: Path) -> None:
    got: list[RunMetrics] = []
    how = compress.RunOptions(track=[got.append])
    report = compress.run(recipe(RTN, **PLAIN), tiny("llama"), tmp_path / "out", options=how)
    words = tmp_path / "words.txt"
    words.write_text("once upon a time a small dog sat by the door " * 4)
    asked = compress.EvaluationOptions(track=[got.append])
    compress.evaluate(tmp_path / "out", [str(words)], options=asked)
    more = compress.ExportOptions(track=[got.append])
    compress.export(tmp_path / "out", "gptq", tmp_path / "gptq", options=more)
    assert [each.command for each in got] == ["run", "eval", "export"]
    assert got[0].values["size"] == report.result.bytes
    assert got[1].values["words/perplexity"] > 1
    assert got[2].settings["to"] == "gptq"
    assert {file.name for file in got[2].files} == {"report.json", "report.html", "report.md"}


def test_names_and_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        OutputError, match=r"^no tracker is called 'sacred'; there are mlflow, wandb"
    ):
        compress.run(
            "int4-rtn", tmp_path, tmp_path / "o", options=compress.RunOptions(track=["sacred"])
        )
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(
        DependencyError, match=r"^mlflow is not installed; pip install 'compress-mod"
    ):
        trackers.hook_of("mlflow")


def test_a_tracker_that_fails(metrics: RunMetrics, report: compress.Report) -> None:
    def log_to_board(_: RunMetrics) -> None:
        raise ConnectionError("refused\nby the server")

    with pytest.raises(
        OutputError, match=r"^board did not take the metrics of .* \(refused\); the w"
    ):
        Share((log_to_board,)).report(report, None)


class Run:
    """A run of W&B, as much of it as is called."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.summary: dict[str, float] = {}
        self.saved: list[str] = []
        self.config: dict[str, Any] = {}
        self.finished = False

    def define_metric(self, name: str, step_metric: str) -> None:
        assert step_metric == f"{name}/step"

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def save(self, path: str, base_path: str, policy: str) -> None:
        self.saved.append(Path(path).name)

    def finish(self) -> None:
        self.finished = True


def test_wandb(monkeypatch: pytest.MonkeyPatch, metrics: RunMetrics) -> None:
    run, asked = Run(), SimpleNamespace()
    fake = ModuleType("wandb")
    fake.run = None  # type: ignore[attr-defined]

    def init(**given: Any) -> Run:
        asked.given = given
        return run

    fake.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    trackers.log_to_wandb(metrics)
    assert asked.given["project"] == "mine"
    assert asked.given["config"] == dict(metrics.settings)
    assert run.summary == dict(metrics.values)
    assert len(run.logged) == 3
    assert run.saved == ["report.json", "report.html"]
    assert run.finished


@pytest.mark.interop
def test_mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, metrics: RunMetrics) -> None:
    """By its own client, in sqlite."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri("sqlite:///runs.db")
    trackers.hook_of("mlflow")(metrics)
    with mlflow.start_run() as active:  # and twice below one that is active, which stays so
        trackers.hook_of("mlflow")(metrics)
        trackers.hook_of("mlflow")(metrics)
        assert mlflow.active_run().info.run_id == active.info.run_id
    client = mlflow.MlflowClient()
    found = [run for run in client.search_runs(["0"]) if run.info.run_id != active.info.run_id]
    assert len(found) == 3
    for run in found:
        assert run.data.metrics.items() >= dict(metrics.values).items()
        assert run.data.params == dict(metrics.settings)
        history = client.get_metric_history(run.info.run_id, metrics.curves[0].name)
        assert [(m.step, m.value) for m in history] == [(0, 2.0), (5, 1.0)]
        names = {each.path for each in client.list_artifacts(run.info.run_id, "report")}
        assert names == {"report/report.json", "report/report.html"}


@pytest.mark.interop
def test_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, metrics: RunMetrics) -> None:
    """By its own reader; a second run of the name has a folder of its own."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    for _ in range(2):
        trackers.hook_of("tensorboard")(metrics)
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    for folder in folders:
        events = EventAccumulator(str(folder))
        events.Reload()
        for name, value in metrics.values.items():
            (scalar,) = events.Scalars(name)
            assert scalar.value == pytest.approx(value, rel=1e-6)
        curve = metrics.curves[0]
        assert [(s.step, s.value) for s in events.Scalars(curve.name)] == [(0, 2.0), (5, 1.0)]


def test_the_command_line_passes_both_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from compress import verbs
    from compress.cli.main import main

    asked: list[Any] = []

    def stop(*args: Any, **kwargs: Any) -> None:
        asked.append(kwargs["options"])
        raise OutputError("stop")

    monkeypatch.setattr(verbs, "run", stop, raising=False)
    line = ["run", "int4-rtn", "--model", "m", "--out", str(tmp_path), "--push", "me/small"]
    assert main([*line, "--track", "mlflow", "--track", "tensorboard"]) == 2
    (options,) = asked
    assert (options.push, options.track) == ("me/small", ("mlflow", "tensorboard"))
    assert json.dumps(options.track) == '["mlflow", "tensorboard"]'
