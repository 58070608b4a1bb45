"""Artifacts of a recipe that round: by its calibration, as `export --text` does, or saying that
there is none."""

from pathlib import Path
from typing import Any

import pytest

from compress.artifacts.export import export_artifact
from compress.artifacts.plan import ArtifactTarget
from compress.artifacts.rounding import of_export
from compress.errors import RecipeError
from compress.recipe import Recipe
from compress.verbs import RunOptions, make_plan, run
from compress_exporters.exporter import Options
from helpers.short_runs import RTN, WORDS, recipe
from helpers.tiny_models import make

TYPE = "IQ4_NL"
CAST = {"method": "cast", "dtype": "fp16"}
UNCACHED = RunOptions(cache=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("recipe") / "model", dtype="bf16")


def asked(*stages: Any, **rest: Any) -> Recipe:
    export = [{"to": "gguf", "type": TYPE, "verify": False}]
    return recipe(*stages, export=export, **rest)


def test_it_rounds_by_the_calibration_of_the_recipe(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes as `export --type --text` of the result, after a stop in the middle, too."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(WORDS * 200)
    shape = {"samples": 3, "length": 64}
    mine = asked(CAST, calibration={"sources": {"text": str(text)}, **shape})
    monkeypatch.setattr(of_export, "SAMPLES", shape["samples"])
    monkeypatch.setattr(of_export, "LENGTH", shape["length"])

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(of_export, "told", stop)
        with pytest.raises(KeyboardInterrupt):
            run(mine, model, out, options=UNCACHED)
    (row,) = run(mine, model, out, options=RunOptions(cache=False, resume=True)).exports
    assert any("columns make up for what others lose" in line for line in row.notes)
    assert not any("without calibration" in line for line in row.notes)
    target = ArtifactTarget("gguf", Options(type=TYPE, text=str(text)))
    alone = tmp_path / "alone"
    export_artifact(out, target, alone, verify=False)
    made = (out / "gguf" / "model.gguf").read_bytes()
    assert made == (alone / "model.gguf").read_bytes()
    export_artifact(out, ArtifactTarget("gguf", Options(type=TYPE)), tmp_path / "x", verify=False)
    assert made != (tmp_path / "x" / "model.gguf").read_bytes()
    assert not (out / "calibration.safetensors").exists()


def test_without_calibration_it_says_so(model: Path, tmp_path: Path) -> None:
    report = run(asked(CAST), model, tmp_path / "out", options=UNCACHED)
    (row,) = report.exports
    assert any(
        line.startswith("rounded without calibration") and line.endswith(" k_quants does")
        for line in row.notes
    )
    assert not any("--text" in line for line in row.notes)


def test_the_plan_knows_that_data_are_read(model: Path) -> None:
    """Its memory, and the text, are looked at before any work."""
    data = {"sources": {"text": "gone.txt"}, "samples": 2, "length": 16}
    plan = make_plan(asked(CAST, calibration=data), model)
    assert plan.looks_at_data
    assert any("gone.txt" in line for line in plan.problems)
    without = make_plan(asked(CAST), model)
    needs = [
        next(need.bytes for need in each.estimate.needs if need.part == "export")
        for each in (plan, without)
    ]
    assert needs[0] > needs[1]


def test_what_is_rounded_already_is_refused_at_once() -> None:
    with pytest.raises(RecipeError) as raised:
        asked(RTN)
    assert str(raised.value).endswith(
        "is 'IQ4_NL', which rounds dense weights, and rtn has rounded them; leave it out, or take"
        " the stage k_quants alone"
    )
