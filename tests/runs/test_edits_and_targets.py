"""Edits in front of a target: schemes are chosen for the model that the edits leave."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compress.checkpoint import disk
from compress.errors import OutputError
from compress.recipe import load
from compress.runs import measuring
from compress.runs.output import _taken, disk_space
from compress.verbs import RunOptions, make_plan, run
from helpers import faults
from helpers.short_runs import recipe, result_of, text_source

UNTIE, CAST = {"method": "untie"}, {"method": "cast", "dtype": "fp16"}
TIED = {"tie_word_embeddings": True}
TARGETED = {
    "method": "rtn",
    "candidates": ["W8A16", {"bits": 4, "group_size": 32}],
    "target": {"bits_per_weight": 6},
}


def test_a_target_behind_edits_is_measured_on_what_they_made(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same choice as for the cast model by itself; killed and gone on with, without a cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = {"calibration": text_source(tmp_path)}
    source, asked = tiny("llama"), recipe(CAST, TARGETED, **data)
    plan = make_plan(asked, source)
    assert plan.is_open
    report = run(asked, source, tmp_path / "out")
    assert [stage.name for stage in report.stages] == ["cast", "measure", "quantize"]
    run(recipe(CAST), source, tmp_path / "cast")
    run(recipe(TARGETED, **data), tmp_path / "cast", tmp_path / "alone")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == (
        load_file(tmp_path / "alone" / "model.safetensors").keys()
    )
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "alone" / "model.safetensors"
    ).read_bytes()
    assert not make_plan(asked, source).is_open
    settled = run(asked, source, tmp_path / "again")
    assert "measure" not in [stage.name for stage in settled.stages]
    assert result_of(tmp_path / "again") == result_of(tmp_path / "out")


@pytest.mark.usefixtures("answered_here")
def test_what_edits_look_at_is_part_of_what_is_measured(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another calibration leaves another model; and what is chosen twice is told in the recipe."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    depth = {"method": "prune_depth", "layers": 1, "by": "influence"}
    source = tiny("llama")
    monkeypatch.setattr("compress.runs.planning.MEASURED_TOKENS", 64)  # of the same four rows
    for samples, known in ((8, False), (8, True), (9, False)):
        data = text_source(tmp_path, samples=samples)
        asked = recipe(depth, TARGETED, calibration=data)
        report = run(asked, source, tmp_path / f"{samples}.{known}")
        assert ("measure" in [stage.name for stage in report.stages]) != known
        (edit,) = load(tmp_path / f"{samples}.{known}" / "recipe.yaml").edits
        assert len(edit.config.keep) == 1


@pytest.fixture
def targeted(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    """A source, and a recipe with two edits and a target; sensitivities are kept in `cache`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = recipe(UNTIE, CAST, TARGETED, calibration=text_source(tmp_path))
    return tiny("llama", **TIED), asked


def test_a_chosen_result_is_published_without_the_cache(targeted: Any, tmp_path: Path) -> None:
    """What the targets chose is not known any more; another recipe is refused as before."""
    (source, asked), out, waiting = targeted, tmp_path / "out", tmp_path / "out.publishing"
    run(asked, source, out)
    whole = result_of(out)
    out.rename(waiting)
    disk.remove_tree(tmp_path / "cache")
    other = replace(asked, text=f"{asked.text}\n# another")
    with pytest.raises(OutputError, match="it belongs to another run: recipe was "):
        run(other, source, out, options=RunOptions(resume=True))
    assert not make_plan(asked, source, out=out, options=RunOptions(resume=True)).problems
    run(asked, source, out, options=RunOptions(resume=True))
    assert result_of(out) == whole


def test_a_resumed_run_chooses_the_same_without_the_cache(targeted: Any, tmp_path: Path) -> None:
    """Killed after the model that the schemes were chosen for is gone."""
    (source, asked), out = targeted, tmp_path / "out"
    run(asked, source, out)
    whole = result_of(out)
    disk.remove_tree(out)
    with faults.counting() as calls:
        run(asked, source, out)
    disk.remove_tree(out)
    last = max(i for i, name in enumerate(calls.names) if name == "open_write")
    with pytest.raises(faults.Killed), faults.fault_at(last, "before"):
        run(asked, source, out)
    assert not list((tmp_path / "out.partial").glob("stage.*"))
    disk.remove_tree(tmp_path / "cache")
    run(asked, source, out, options=RunOptions(resume=True))
    assert result_of(out) == whole


def test_the_time_of_a_measurement_is_counted_once(
    targeted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, clock, later = measuring.measure_layers, time.perf_counter, 0

    def slow(*given: Any) -> Any:
        nonlocal later
        later += 1000  # seconds, by the clock that all read
        return real(*given)

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + later)
    monkeypatch.setattr(measuring, "measure_layers", slow)
    report = run(targeted[1], targeted[0], tmp_path / "out")
    (rounding,) = (stage for stage in report.stages if stage.name == "quantize")
    assert rounding.seconds < 1000


def test_chosen_schemes_that_the_disk_has_no_room_for_are_refused(
    targeted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they are chosen the run is held to the smallest ones."""
    source, asked = targeted[0], replace(targeted[1], edits=targeted[1].edits[1:])
    partial = tmp_path / "out.partial"
    needed = disk_space(make_plan(asked, source), partial, torch.float32).needed
    monkeypatch.setattr("compress.runs.output.free_bytes", lambda _: needed - _taken(partial))
    with pytest.raises(OutputError, match="not enough disk space"):
        run(asked, source, tmp_path / "out")
