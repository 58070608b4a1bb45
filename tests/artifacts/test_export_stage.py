"""Recipes that ask for artifacts: made of the result, inside of its folder."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from compress.artifacts import recipe_exports
from compress.errors import CheckpointError, DependencyError, OutputError
from compress.recipe import ExportConfig, dump
from compress.recipe.reading.parse import parse
from compress.report.codec import read_json
from compress.report.terminal.copied import as_blocks
from compress.verbs import RunOptions, make_plan, run
from compress_exporters.exporter import Options
from helpers import tiny_models
from helpers.pages.copied import blocks_to_copy
from helpers.short_runs import RTN, recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("stage") / "model")


def test_an_artifact_of_the_result(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = recipe(RTN, export=["onnx"])
    report = run(asked, model, out)
    (row,) = report.exports
    assert (row.target, row.path, row.proof) == ("onnx", "onnx", "tokens")
    assert row.max_logit_error is not None
    assert row.max_logit_error < 1e-4
    assert set(row.files) == {path.name for path in (out / "onnx").iterdir()}
    assert row.bytes == sum(path.stat().st_size for path in (out / "onnx").iterdir())
    assert [stage.name for stage in report.stages] == ["quantize", "export"]
    assert (row.fused["Attention"], row.unfused) == (2, {})
    assert "16 greedy tokens are the same" in row.detail
    assert read_json(out / "report" / "report.json") == report
    page = out / "report" / "report.html"
    assert "Exports" in page.read_text()
    install, session = row.open_with
    assert install == "pip install onnxruntime"
    assert f'"{out / "onnx" / "model.onnx"}"' in session
    assert blocks_to_copy(page)[:-1] == [*as_blocks(report.open_with), install, session]
    again = run(asked, model, out, options=RunOptions(overwrite=True))
    assert again.exports == report.exports
    (out / "onnx" / "mine.txt").touch()
    with pytest.raises(OutputError, match=r"it holds 'onnx/mine.txt'"):
        run(asked, model, out, options=RunOptions(overwrite=True))


def test_options_and_notes(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = {"to": "onnx", "dtype": "fp16", "max_context": 16, "verify": False}
    report = run(recipe({**RTN, "scheme": "W3A16"}, export=[options]), model, out)
    (row,) = report.exports
    assert row.proof == "none"
    assert row.notes == ("codes of 3 bits are in 4-bit integers, unchanged",)
    assert row.detail == ()
    assert not any("export" in line for line in report.warnings)


def test_what_cannot_be_made_is_left_out_and_said(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is worth more than an artifact of it."""
    monkeypatch.setattr("compress_exporters.onnx.proof.checks.LIMITS", {"fp32": 0.0})
    report = run(recipe(RTN, export=["onnx"]), model, tmp_path / "out")
    assert report.exports == ()
    (line,) = [line for line in report.warnings if line.startswith("export to onnx left out: ")]
    assert "logits are not those of the weights" in line
    assert not (tmp_path / "out" / "onnx").exists()


def test_too_little_disk_is_said(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_exports, "free_bytes", lambda folder: 1000)
    report = run(recipe(RTN, export=["onnx"]), model, tmp_path / "out")
    assert any("and 1.00 kB are free" in line for line in report.warnings)


def test_a_run_that_was_stopped_makes_it_anew(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipe(RTN, export=["onnx"])

    def stop(build: Any, folder: Path, *rest: Any) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("compress_exporters.onnx.saving.save", stop)
        with pytest.raises(KeyboardInterrupt):
            run(asked, model, tmp_path / "out")
    assert (tmp_path / "out.partial" / "onnx" / "half").exists()
    report = run(asked, model, tmp_path / "out", options=RunOptions(resume=True))
    assert report.exports[0].proof == "tokens"
    assert not (tmp_path / "out" / "onnx" / "half").exists()


def test_what_the_source_tells_is_refused_before_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipe(RTN, export=["onnx"])
    unlisted = tiny_models.make(tiny_models.UNLISTED[0], tmp_path / "model")
    reason = r"export\[0\]: model type '\w+' is in no table of forwards"
    with pytest.raises(CheckpointError, match=reason):
        run(asked, unlisted, tmp_path / "out")
    (problem,) = make_plan(asked, unlisted).problems
    assert "is in no table of forwards" in problem
    monkeypatch.setattr("compress_exporters.exporter.installed", lambda name: False)
    with pytest.raises(DependencyError, match=r"onnx needs onnx, onnx_ir, onnxruntime; install"):
        run(asked, model, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_options_are_those_of_the_exporters() -> None:
    ours = {item.name: item.default for item in fields(ExportConfig)}
    theirs = {item.name: item.default for item in fields(Options)}
    assert theirs.pop("in_place") is False  # artifacts of a recipe have folders of their own
    assert theirs.pop("imatrix") is theirs.pop("text") is theirs.pop("imatrix_out") is None
    assert {k: v for k, v in ours.items() if k not in ("to", "verify")} == theirs
    config = ExportConfig("gguf", "fp16", 7, True, 0, "q6_k", "Q4_K_M")
    assert recipe_exports._options(config) == Options(
        "fp16", 7, True, 0, embedding="q6_k", type="Q4_K_M"
    )


def test_the_recipe_is_written_out_whole(model: Path) -> None:
    asked = recipe(RTN, export=["onnx"])
    assert asked.export == (ExportConfig("onnx"),)
    assert parse(dump(asked)) == asked
    assert recipe(RTN, export="onnx") == asked
    assert recipe(RTN, export=None).export == ()
