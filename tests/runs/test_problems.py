"""What would stop a run is in its plan; what stops a measurement does not stop the result."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compress.blocks import sample
from compress.cli.main import main
from compress.errors import CompressError, DataError
from compress.machine import environment, memory
from compress.plan.memory_needs import QUANTIZING, WRITING
from compress.plan.room import Room, fitting_needs
from compress.recipe import Recipe
from compress.report.units import size
from compress.verbs import (
    EvaluationOptions,
    RunOptions,
    evaluate_checkpoint,
    make_plan,
    plan_table,
    run,
)
from helpers import faults
from helpers.holding import alive, held_elsewhere
from helpers.short_runs import GPTQ, RTN, SELF, WORDS, recipe, recipe_file, text_source


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch, small_process) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)


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
    length, gone, tokenizer, short = plan.problems
    assert "calibration.length: is 512, the model's context is 128 tokens" in length
    assert "gone.txt" in gone
    assert "tokenizer" in tokenizer
    assert "of memory," in short
    assert plan.to_json()["problems"] == list(plan.problems)
    assert f"problem: {short}" in plan_table(plan).splitlines()
    with pytest.raises(CompressError) as first:
        run(asked, source, tmp_path / "out")
    assert str(first.value) == length


TRAININGS = {
    "gone": ({"sources": [{"text": "gone.txt"}]}, "gone.txt: there is no such file"),
    "long": ({"length": 512}, "stages[1].length: is 512, the model's context is 128 tokens"),
    "one row": ({"tokens": 1}, "stages[1].tokens: is 1, one row of 16 tokens; training takes two"),
    "no text": ({"sources": [{"text": "few.txt"}]}, "few.txt"),
}


@pytest.mark.parametrize("case", TRAININGS)
def test_what_would_stop_a_training_stops_the_plan(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.txt").write_text(WORDS[:20])
    options, line = TRAININGS[case]
    cut = {"method": "prune_width", "ffn": 24, "repair": "none"}
    train = {"method": "distill", "tokens": 640, "batch": 4, "scope": "model", **options}
    data = {**text_source(tmp_path), "length": 16}
    asked = recipe(cut, train, calibration=data)
    problem, *_ = make_plan(asked, tiny("gpt2")).problems
    assert line in problem
    with pytest.raises(CompressError):
        run(asked, tiny("gpt2"), tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_a_training_draws_few_texts_as_its_run_does(tiny, tmp_path: Path) -> None:
    """Two rows are less than there are sources, and the run draws as many as it is given."""
    texts = []
    for i in range(3):
        path = tmp_path / f"{i}.txt"
        path.write_text(WORDS[i:] * 4)
        texts.append({"text": str(path)})
    train = {"method": "distill", "tokens": 640, "length": 16, "batch": 4, "scope": "model"}
    asked = recipe({**train, "sources": texts})
    assert make_plan(asked, tiny("llama")).problems == ()


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


def dry(asked: Recipe, source: Path, out: Path, **how: Any) -> tuple[str, ...]:
    """Problems of a dry run, which are those of a run and change nothing."""
    before, options = sorted(out.parent.rglob("*")), RunOptions(**how)
    problems = make_plan(asked, source, out=out, options=options).problems
    assert sorted(out.parent.rglob("*")) == before
    if problems:
        with pytest.raises(CompressError) as caught:
            run(asked, source, out, options=options)
        assert str(caught.value) == problems[0]
    return problems


def test_a_dry_run_looks_at_the_output_folder(tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert dry(recipe(RTN), tiny("llama"), out) == ()
    out.mkdir()
    assert dry(recipe(RTN), tiny("llama"), out) == ()
    (out / "mine.txt").write_text("keep")
    (line,) = dry(recipe(RTN), tiny("llama"), out)
    assert "it holds 'mine.txt'" in line
    assert dry(recipe(RTN), tiny("llama"), out, overwrite=True) == (line,)
    (out / "mine.txt").unlink()
    run(recipe(RTN), tiny("llama"), out)
    (line,) = dry(recipe(RTN), tiny("llama"), out)
    assert line == f"{out} is not empty; choose another folder or add --overwrite"
    assert dry(recipe(RTN), tiny("llama"), out, overwrite=True) == ()
    (line,) = dry(recipe(RTN), tiny("llama"), out, overwrite=True, resume=True)
    assert line.startswith("nothing to resume: ")
    (line,) = dry(recipe(RTN), tiny("llama"), tmp_path / "no" / "out")
    assert line.startswith(f"{tmp_path / 'no'} does not exist")


def test_a_dry_run_looks_at_what_was_begun(tiny, tmp_path: Path) -> None:
    out, part = tmp_path / "out", tmp_path / "out.partial"
    with pytest.raises(faults.Killed), faults.fault_at(60):
        run(recipe(RTN), tiny("llama"), out)
    (line,) = dry(recipe(RTN), tiny("llama"), out)
    assert line.startswith(f"{part} is left from a run that was stopped; remove it to start")
    assert dry(recipe(RTN), tiny("llama"), out, resume=True) == ()
    (line,) = dry(recipe({**RTN, "group_size": 16}), tiny("llama"), out, resume=True)
    assert "recipe.stages[0].scheme.group_size was 32, is 16" in line
    hows: tuple[dict[str, bool], ...] = ({}, {"resume": True}, {"overwrite": True})
    with held_elsewhere(part) as pid:
        for how in hows:
            assert dry(recipe(RTN), tiny("llama"), out, **how) == (alive(part, pid),)
    (part / "model.safetensors").unlink()
    (line,) = dry(recipe(RTN), tiny("llama"), out, resume=True)
    assert "model.safetensors is missing" in line


def test_a_dry_run_looks_at_a_result_that_waits(tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(recipe(RTN), tiny("llama"), out)
    out.rename(tmp_path / "out.publishing")
    assert dry(recipe(RTN), tiny("llama"), out, resume=True) == ()
    (line,) = dry(recipe(RTN, seed=1), tiny("llama"), out, resume=True)
    assert "recipe.seed was 0, is 1" in line


def test_a_dry_run_looks_at_the_disk_and_the_inputs(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(f_bavail=5, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    (line,) = dry(recipe(RTN), tiny("llama"), tmp_path / "out")
    assert line.startswith(f"not enough disk space in {tmp_path}: ")
    gone = recipe(RTN, evaluation={"texts": [{"text": str(tmp_path / "gone.txt")}]})
    text, space = dry(gone, tiny("llama"), tmp_path / "out")
    assert "gone.txt" in text
    assert space == line
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "x").touch()
    begun, text = dry(gone, tiny("llama"), tmp_path / "out")
    assert "is left from a run" in begun


def test_too_little_calibration_text_is_seen_before_work(tiny, tmp_path: Path) -> None:
    little = recipe(GPTQ, calibration=text_source(tmp_path, samples=900, length=64))
    (line,) = dry(little, tiny("llama"), tmp_path / "out")
    assert "words.txt holds " in line
    assert " rows of 64 tokens, 900 rows are asked for; lower samples or length" in line
    enough = recipe(GPTQ, calibration=text_source(tmp_path))
    assert make_plan(enough, tiny("llama")).problems == ()


def test_the_plan_says_what_it_will_measure_on(tiny, tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("a" * 2000)
    own = {"self": True, "samples": 2, "length": 16}
    less = {**own, "name": "less", "max_tokens": 20}
    texts = [own, less, {"text": str(file)}, {"text": str(file), "name": "b", "max_tokens": 50}]
    shown = plan_table(make_plan(recipe(RTN, evaluation={"texts": texts}), tiny("llama")))
    assert "measures self (32 tokens), less (20 tokens at most), words (2.00 kB), b (50" in shown
    assert "measures" not in plan_table(make_plan(recipe(RTN), tiny("llama")))


def test_the_exit_code_of_a_dry_run(tiny, tmp_path: Path, capsys) -> None:
    (tmp_path / "out").mkdir()
    line = ["run", str(recipe_file(tmp_path, RTN)), "--model", str(tiny("llama"))]
    line += ["--out", str(tmp_path / "out"), "--dry-run"]
    assert main(line) == 0
    (tmp_path / "out" / "mine.txt").touch()
    assert main(line) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"problem: {tmp_path / 'out'} is no")
    assert main([*line, "--overwrite"]) == 1


def test_calibration_that_does_not_fit_is_refused_before_work(
    tiny, tmp_path: Path, no_memory
) -> None:
    with pytest.raises(DataError, match=r" needs .* of memory, .* are free; "):
        run(recipe(GPTQ, calibration=SELF), tiny("llama"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    plan = make_plan(recipe(GPTQ, calibration=SELF), tiny("llama"))
    (line,) = plan.problems
    room = plan.room.bytes
    assert room is not None
    assert f"needs {size(plan.estimate.peak_rss_bytes)} of memory, {size(room)} are free" in line


def test_what_is_written_already_needs_no_memory(tiny) -> None:
    """A resumed run reads the calibration text that the first one had the model write."""
    run_size = make_plan(recipe(GPTQ, calibration=SELF), tiny("llama")).run_size
    parts = [need.part for need in fitting_needs(run_size, Room(1 << 50))]
    assert parts == [WRITING, QUANTIZING]
    drawn = [need.part for need in fitting_needs(run_size, Room(1 << 50, drawn=True))]
    assert drawn == [QUANTIZING]


def test_evaluation_that_does_not_fit_is_left_out(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "_held_and_room", lambda device: (0, 1000))
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
    with pytest.raises(DataError, match=r"^evaluation text 'self': sampling "):
        evaluate_checkpoint(tmp_path / "out", EvaluationOptions(texts=["self"]))


def test_slow_kernels_are_a_warning(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"cpu": "torch, slower: no C++ compiler found", "gpu": "torch, slower: no triton"}
    monkeypatch.setattr(environment, "status", lambda: found)
    report = run(recipe(RTN), tiny("llama"), tmp_path / "out")
    assert report.machine.kernels == found
    (warning,) = [line for line in report.warnings if "kernels" in line]
    assert "torch, slower: no C++ compiler found" in warning
    page = (tmp_path / "out" / "report" / "report.html").read_text()
    assert "kernels, cpu" in page
