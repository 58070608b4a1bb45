"""Runs with the cache: byte for byte those without it, and quicker by what was kept."""

from dataclasses import replace
from pathlib import Path

import pytest

from compress.blocks import author
from compress.events import Event
from compress.report.schema import Report
from compress.usercache import place
from compress.usercache.place import made_folder
from compress.verbs import EvaluationOptions, RunOptions, evaluate_checkpoint, run
from helpers.short_runs import GPTQ, RTN, SELF, recipe, result_of
from helpers.tiny_models import make

TEXTS = {
    "texts": [{"self": True, "samples": 3, "length": 16}],
    "samples": {"prompts": ["once upon"], "tokens": 4},
}
FIRST = recipe(GPTQ, calibration=SELF, evaluation=TEXTS)
SECOND = recipe(RTN, evaluation=TEXTS)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("source"), dtype="bf16")


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, but for compiled kernels."""
    monkeypatch.setattr(place, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.delenv(place.SETTING)


def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts rows that are drawn from now on."""
    rows: list[int] = []
    draw = author.generate

    def counted(weights: object, skeleton: object, asked: author.OwnText, **how: object) -> object:
        rows.append(asked.count)
        return draw(weights, skeleton, asked, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(author, "generate", counted)
    return rows


def measured(report: Report) -> object:
    assert report.quality is not None
    return report.quality, report.samples


def test_a_second_recipe_finds_what_the_first_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [
        run(each, source, tmp_path / f"alone-{i}", options=RunOptions(cache=False))
        for i, each in enumerate((FIRST, SECOND))
    ]
    assert not made_folder().exists()
    rows = written(monkeypatch)
    first = run(FIRST, source, tmp_path / "kept-0")
    assert sorted(rows) == [1, 1, 3, 4]  # both continuations, both texts
    assert not [x for x in first.notes if "cache" in x]
    rows.clear()
    events: list[Event] = []
    second = run(SECOND, source, tmp_path / "kept-1", progress=events.append)
    assert rows == [1]  # the result's own continuation
    (line,) = [x for x in second.notes if "cache" in x]
    assert line == (
        "text that the model wrote and the source's evaluation: taken from the cache, so the times"
        " are without it (--no-cache makes it)"
    )
    stages = [event.stage for event in events if event.unit]
    assert "evaluate result" in stages
    assert "evaluate source" not in stages
    for i, each in enumerate((first, second)):
        assert result_of(tmp_path / f"kept-{i}") == result_of(tmp_path / f"alone-{i}")
        assert measured(each) == measured(alone[i])


def test_an_evaluation_finds_what_a_run_kept(source: Path, tmp_path: Path) -> None:
    run(SECOND, source, tmp_path / "out")
    asked = EvaluationOptions(("self",), max_documents=2)
    first, again = (evaluate_checkpoint(tmp_path / "out", asked, against=source) for _ in range(2))
    bare = evaluate_checkpoint(tmp_path / "out", replace(asked, cache=False), against=source)
    assert first.quality == again.quality == bare.quality
    assert [bool(x.notes) for x in (first, again, bare)] == [False, True, False]


def test_damage_is_made_anew(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(FIRST, source, tmp_path / "a")
    for path in made_folder().glob("*.made"):
        held = bytearray(path.read_bytes())
        held[len(held) // 2] ^= 4
        path.write_bytes(held)
    rows = written(monkeypatch)
    report = run(FIRST, source, tmp_path / "b")
    assert sorted(rows) == [1, 1, 3, 4]
    assert not report.notes
    assert result_of(tmp_path / "a") == result_of(tmp_path / "b")
    rows.clear()
    assert run(FIRST, source, tmp_path / "c").notes
    assert rows == [1]


def test_another_model_machine_or_seed_is_another_entry(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(SECOND, source, tmp_path / "a")
    rows = written(monkeypatch)
    other = make("llama", tmp_path / "other", dtype="bf16", seed=1)
    run(SECOND, other, tmp_path / "b")
    monkeypatch.setattr("compress.machine.environment.cpu_name", lambda: "another processor")
    run(SECOND, source, tmp_path / "c")
    assert sorted(rows) == [1, 1, 1, 1, 3, 3]
