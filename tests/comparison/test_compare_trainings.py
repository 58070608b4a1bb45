"""Recipes that train the model: left out of a comparison of all, unless they are asked for."""

import json
from pathlib import Path
from typing import Any

import pytest

from compress.cli.main import main
from compress.comparison import compare as comparing
from compress.comparison import entrants as candidates
from compress.comparison.entrants import entrants
from compress.errors import CompressError
from compress.events import silent
from compress.verbs import CompareOptions, RunOptions, compare
from helpers.tiny_models import make

# Two that train, and two that do not, one of them with an edit.
SOME = ["gqa-uptrain", "int8-rtn", "prune-60-distill", "prune-80"]


def test_one_flag_adds_those_that_train(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the default leaves out says how it is had."""
    monkeypatch.setattr(candidates, "builtin_names", lambda: SOME)
    options = RunOptions(device="cpu")
    runs, left = entrants((), demo_model, CompareOptions(), options, silent)
    every, none = entrants((), demo_model, CompareOptions(trainings=True), options, silent)
    assert [x.name for x in runs] == ["int8-rtn", "prune-80"]
    assert [x.name for x in left] == ["gqa-uptrain", "prune-60-distill"]
    assert ([x.name for x in every], none) == (SOME, [])
    for each, planned in zip(left, (every[0], every[2]), strict=True):
        assert each.reason.startswith("it trains the model, about ")
        assert each.reason.endswith("; add --trainings, or name it with --recipe")
        assert planned.seconds > every[1].seconds


def test_a_recipe_that_is_named_trains_without_it(demo_model: Path) -> None:
    named = entrants(["gqa-uptrain"], demo_model, CompareOptions(), RunOptions(), silent)[0]
    assert [x.name for x in named] == ["gqa-uptrain"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make("llama", tmp_path / "source", dtype="bf16")


def refused(*given: Any, **rest: Any) -> str:
    with pytest.raises(CompressError) as raised:
        compare(*given, **rest)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_resume_with_others_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, runs = tmp_path / "out", list[str]()

    def stopped(name: str, *given: Any, **rest: Any) -> None:
        runs.append(name)
        (out / f"{name}.partial").mkdir(exist_ok=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(comparing, "run", stopped)
    monkeypatch.setattr(candidates, "builtin_names", lambda: ["int8-rtn", "prune-60-distill"])
    with pytest.raises(KeyboardInterrupt):
        compare(source, out)
    assert runs == ["int8-rtn"]
    said = refused(source, out, asked=CompareOptions(resume=True, trainings=True))
    assert said == (
        f"{out} cannot be resumed, it belongs to another comparison: recipes differ in"
        " prune-60-distill; trainings was False, is True; remove it to start again"
    )
    with pytest.raises(KeyboardInterrupt):
        compare(source, out, asked=CompareOptions(resume=True))
    assert runs == ["int8-rtn"] * 2


def test_one_that_an_earlier_version_began_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was not asked is as it did it."""
    out = tmp_path / "out"

    def stopped(name: str, *given: Any, **rest: Any) -> None:
        (out / f"{name}.partial").mkdir(exist_ok=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(comparing, "run", stopped)
    monkeypatch.setattr(candidates, "builtin_names", lambda: ["int8-rtn"])
    with pytest.raises(KeyboardInterrupt):
        compare(source, out)
    held = json.loads((out / "compare.json").read_text())
    del held["begun"]["trainings"]
    (out / "compare.json").write_text(json.dumps(held))
    with pytest.raises(KeyboardInterrupt):
        compare(source, out, asked=CompareOptions(resume=True))
    said = refused(source, out, asked=CompareOptions(resume=True, trainings=True))
    assert "another comparison: trainings was False, is True; remove" in said


def test_where_it_adds_nothing_it_is_refused(source: Path, tmp_path: Path) -> None:
    asked, out = CompareOptions(trainings=True), tmp_path / "out"
    assert refused(source, out, recipes=["int8-rtn"], asked=asked) == (
        "--trainings adds built-in recipes, and recipes are named; leave it out"
    )
    assert refused([tmp_path / "a", tmp_path / "b"], out, asked=asked) == (
        "--trainings adds built-in recipes, and nothing is run; leave it out"
    )
    assert not out.exists()


def test_the_command_line_says_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[CompareOptions] = []

    def stopped(*given: Any, asked: CompareOptions, **rest: Any) -> None:
        heard.append(asked)
        raise KeyboardInterrupt

    monkeypatch.setattr(comparing, "compare", stopped)
    words = ["compare", str(source), "--out", str(tmp_path / "out")]
    for more in ([], ["--trainings"]):
        main([*words, *more])
    assert [x.trainings for x in heard] == [False, True]
