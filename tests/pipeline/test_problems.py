"""What would stop a run is in its plan; what stops a measurement does not stop the result."""

import shutil
from pathlib import Path

import pytest
import torch

from compress.blocks import sample
from compress.checkpoint import Checkpoint
from compress.cli.main import main
from compress.errors import CompressError, DataError
from compress.pipeline import environment, evaluate_checkpoint, make_plan, plan_table, run
from compress.pipeline.inputs import check_inputs
from pipeline_runs import GPTQ, RTN, SELF, WORDS, recipe, recipe_file, text_source


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "_free_memory", lambda device: 1000)


def test_everything_that_stops_the_run_is_in_the_plan(tiny, tmp_path: Path, no_memory) -> None:
    source = Path(shutil.copytree(tiny("llama"), tmp_path / "source"))
    (source / "tokenizer.json").unlink()
    (source / "tokenizer_config.json").unlink()
    asked = recipe(
        GPTQ,
        calibration={"sources": "self", "samples": 4, "length": 512},
        evaluation={"texts": [{"text": str(tmp_path / "gone.txt")}]},
    )
    plan = make_plan(asked, source)
    length, gone, tokenizer, memory = plan.problems
    assert "calibration.length: is 512, the model's context is 128 tokens" in length
    assert "gone.txt" in gone
    assert "tokenizer" in tokenizer
    assert "sampling from the model needs" in memory
    assert plan.to_json()["problems"] == list(plan.problems)
    assert f"problem: {memory}" in plan_table(plan).splitlines()
    with pytest.raises(CompressError) as first:
        run(asked, source, tmp_path / "out")
    assert str(first.value) == length


def test_a_plan_without_problems_says_none(tiny, tmp_path: Path) -> None:
    plan = make_plan(recipe(GPTQ, calibration=text_source(tmp_path)), tiny("llama"))
    assert plan.problems == ()
    assert "problem" not in plan_table(plan)


def test_plan_and_dry_run_exit_1(tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {"texts": [{"text": str(tmp_path / "gone.txt")}]}
    asked = str(recipe_file(tmp_path, RTN, evaluation=texts))
    line = [asked, "--model", str(tiny("llama"))]
    assert main(["plan", *line]) == 1
    shown = capsys.readouterr().out
    assert "gone.txt" in shown.splitlines()[-1]
    assert main(["run", *line, "--out", str(tmp_path / "out"), "--dry-run"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == shown.splitlines()[-1]


def test_calibration_that_does_not_fit_is_refused_before_work(
    tiny, tmp_path: Path, no_memory
) -> None:
    with pytest.raises(DataError, match="sampling from the model needs"):
        run(recipe(GPTQ, calibration=SELF), tiny("llama"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    plan = make_plan(recipe(GPTQ, calibration=SELF), tiny("llama"))
    resumed = (plan, Checkpoint.open(tiny("llama")), torch.bfloat16, "cpu")
    check_inputs(*resumed, drawn=True)


def test_evaluation_that_does_not_fit_is_left_out(tiny, tmp_path: Path, no_memory) -> None:
    words = tmp_path / "words.txt"
    words.write_text(WORDS)
    own = {"kind": "self", "name": "own", "samples": 2, "length": 16}
    asked = recipe(RTN, evaluation={"texts": [own, {"text": str(words), "name": "words"}]})
    assert make_plan(asked, tiny("llama")).problems == ()
    report = run(asked, tiny("llama"), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert report.quality is not None
    assert [text.name for text in report.quality.texts] == ["words"]
    (warning,) = [line for line in report.warnings if "own" in line]
    assert warning.startswith("evaluation text 'own' was left out: sampling from the model needs")
    alone = run(recipe(RTN, evaluation={"texts": [own]}), tiny("llama"), tmp_path / "alone")
    assert alone.quality is None
    with pytest.raises(DataError, match="'self' was left out: "):
        evaluate_checkpoint(tmp_path / "out", texts=["self"])


def test_slow_kernels_are_a_warning(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"cpu": "torch, slower: no C++ compiler found", "gpu": "torch, slower: no triton"}
    monkeypatch.setattr(environment, "status", lambda: found)
    report = run(recipe(RTN), tiny("llama"), tmp_path / "out")
    assert report.machine.kernels == found
    (warning,) = [line for line in report.warnings if "kernels" in line]
    assert "torch, slower: no C++ compiler found" in warning
    page = (tmp_path / "out" / "report" / "report.html").read_text()
    assert "kernels, cpu" in page
