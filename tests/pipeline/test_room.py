"""Every peak is held against the memory there is, and a refusal names what would fit."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress.blocks import memory
from compress.cli.main import main
from compress.errors import DataError
from compress.pipeline import make_plan, plan_table, run
from compress.pipeline.memory_needs import (
    QUANTIZING,
    TORCH_BYTES,
    TRANSFORMERS_BYTES,
    Job,
    memory_needs,
)
from compress.pipeline.room import (
    Room,
    check_room,
    fitting_needs,
    largest_fitting,
    left_out,
    memory_warnings,
)
from compress.report.units import size
from pipeline_runs import GPTQ, RTN, SELF, recipe, recipe_file, text_source


@pytest.fixture
def job(tiny, tmp_path: Path) -> Job:
    """GPTQ on 48 x 2048 tokens of text in fp32, at the widths of a 7B model with two blocks."""
    plan = make_plan(recipe(GPTQ, calibration=text_source(tmp_path)), tiny("llama"))
    return wide(plan.job)


def wide(job: Job) -> Job:
    spec, width = job.spec, {64: 4096, 128: 11008}
    linears = [
        (replace(x, shape=(width.get(x.shape[0], 4096), width.get(x.shape[1], 4096))), scheme)
        for x, scheme in job.linears
    ]
    wider = replace(spec, hidden=4096, intermediate=11008, context=4096)
    assert job.calibration is not None
    calibration = replace(job.calibration, samples=48, length=2048)
    return replace(job, spec=wider, linears=linears, calibration=calibration, dtype=torch.float32)


def peak(job: Job) -> int:
    return max(need.bytes for need in memory_needs(job) if need.required)


def test_what_is_far_too_much_is_refused_and_what_is_near_is_tried(job: Job) -> None:
    needed = peak(job)
    assert needed > 3e9
    check_room(job, Room(needed))
    assert memory_warnings(job, Room(needed)) == ()
    little = Room(int(needed / 1.05))
    check_room(job, little)
    (line,) = memory_warnings(job, little)
    assert line.startswith(f"quantizing needs {size(needed)} of memory, {size(little.bytes)} are")
    assert "it is tried, as the estimate is not exact; what would fit: " in line
    with pytest.raises(DataError, match=r"^quantizing needs .* of memory, .* are free; what would"):
        check_room(job, Room(int(needed / 1.11)))
    check_room(job, Room(None))


def test_what_this_process_has_is_not_taken_again(job: Job) -> None:
    """The tolerance is on what is still to be taken: of a process that holds much it is little."""
    held = 3 * 10**9
    whole = max(need.bytes for need in memory_needs(job, held))
    assert whole == held + peak(job) - TORCH_BYTES - TRANSFORMERS_BYTES
    check_room(job, Room(int(peak(job) / 1.08)))
    with pytest.raises(DataError):
        check_room(job, Room(int(whole / 1.08), held=held))


@pytest.mark.parametrize("share", [0.85, 0.7, 0.5])
def test_what_a_message_names_does_fit(job: Job, share: float) -> None:
    room = Room(int(share * peak(job)))
    with pytest.raises(DataError) as caught:
        check_room(job, room)
    named = str(caught.value).partition("what would fit: ")[2]
    assert named
    assert job.calibration is not None
    samples = re.search(r"calibration\.samples=(\d+)", named)
    if samples is not None:
        for more, fits in ((0, True), (1, False)):
            count = int(samples[1]) + more
            less = replace(job, calibration=replace(job.calibration, samples=count))
            assert (peak(less) <= room.bytes) == fits
    length = re.search(r"calibration\.length=(\d+)", named)
    if length is not None:
        less = replace(job, calibration=replace(job.calibration, length=int(length[1])))
        assert peak(less) <= room.bytes
    if "--dtype bf16" in named:
        assert peak(replace(job, dtype=torch.bfloat16)) <= room.bytes


def test_where_nothing_fits_the_least_is_named(job: Job) -> None:
    with pytest.raises(DataError, match="the least that any recipe needs for this model is") as no:
        check_room(job, Room(10**8))
    least = str(no.value).rpartition(" is ")[2]
    assert 0.3e9 < float(least.split()[0]) * {"MB": 1e6, "GB": 1e9}[least.split()[1]] < peak(job)


def test_no_change_is_named_on_top_of_one_that_does_alone(tiny) -> None:
    own = {"kind": "self", "samples": 2, "length": 16}
    plan = make_plan(recipe(GPTQ, calibration=SELF, evaluation={"texts": [own]}), tiny("llama"))
    room = Room(max(x.bytes for x in memory_needs(wide(plan.job)) if x.required) // 2)
    with pytest.raises(DataError) as caught:
        check_room(wide(plan.job), room)
    assert str(caught.value).count("int4-rtn") <= 1


def test_what_only_the_report_needs_is_left_out(tiny) -> None:
    own = {"kind": "self", "name": "own", "samples": 128, "length": 128}
    job = make_plan(recipe(RTN, evaluation={"texts": [own]}), tiny("llama")).job
    needs = {need.part: need for need in memory_needs(job)}
    text = needs["evaluation text 'own'"]
    assert not text.required
    huge = replace(job, spec=replace(job.spec, vocab=1 << 20))
    assert {need.part for need in fitting_needs(huge, Room(1 << 60))} == set(needs)
    small = Room(int(next(x.bytes for x in memory_needs(huge) if x.part == text.part) / 1.2))
    (line,) = left_out(huge, small)
    assert line.startswith("evaluation text 'own' needs ")
    assert line.endswith(" are free: it will be left out")
    assert text.part not in {need.part for need in fitting_needs(huge, small)}


def test_what_evaluation_imports_counts_for_a_run_without_data(tiny) -> None:
    """transformers was tried before the first weight was read: 267 MB were planned, 510 taken."""
    own = {"kind": "self", "samples": 2, "length": 16}
    alone = make_plan(recipe(RTN), tiny("llama")).job
    measured = make_plan(recipe(RTN, evaluation={"texts": [own]}), tiny("llama")).job
    (before,) = memory_needs(alone)
    after = {need.part: need.bytes for need in memory_needs(measured)}
    assert before.bytes < 0.35e9
    assert after[QUANTIZING] - before.bytes > 0.2e9
    assert max(after.values()) > 0.5e9


def test_plan_and_refusal_have_one_number(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_process
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    asked = recipe(GPTQ, calibration=text_source(tmp_path))
    plan = make_plan(asked, tiny("llama"))
    (problem,) = plan.problems
    assert plan.room.bytes is not None
    needed, free = size(plan.estimate.peak_rss_bytes), size(plan.room.bytes)
    assert f"memory   peak about {needed} (quantizing), {free} free" in plan_table(plan)
    assert problem.startswith(f"quantizing needs {needed} of memory, {free} are free; ")
    with pytest.raises(DataError) as caught:
        run(asked, tiny("llama"), tmp_path / "out")
    # Memory that was taken in between is in both numbers of the later line.
    assert str(caught.value).startswith("quantizing needs ")
    assert not (tmp_path / "out.partial").exists()


def test_a_plan_for_another_machine(
    tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", str(recipe_file(tmp_path, RTN)), "--model", str(tiny("llama"))]
    assert main([*line, "--memory", "64GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"] == {"free_bytes": 64 << 30, "assumed": True}
    assert found["estimate"]["peak_rss_bytes"] == max(found["estimate"]["parts"].values())
    assert main([*line, "--memory", "100MB"]) == 1
    shown = capsys.readouterr().out
    assert "100 MB given" in shown
    assert "not included, of this machine)" in shown
    assert "problem: quantizing needs " in shown
    assert main([*line, "--memory", "much"]) == 2
    assert "'much': it takes a size such as" in capsys.readouterr().err


def test_the_largest_that_fits() -> None:
    assert largest_fitting(100, lambda n: n <= 37) == 37
    assert largest_fitting(100, lambda n: True) == 100
    assert largest_fitting(100, lambda n: False) is None
