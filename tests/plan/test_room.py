"""Every peak is held against the memory there is, and a refusal names what would fit."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress.cli.main import main
from compress.errors import DataError
from compress.machine import memory
from compress.plan.memory_needs import (
    QUANTIZING,
    TORCH_BYTES,
    TRANSFORMERS_BYTES,
    RunSize,
    memory_needs,
)
from compress.plan.room import (
    Room,
    check_room,
    fitting_needs,
    largest_fitting,
    left_out,
    memory_warnings,
)
from compress.report.units import size
from compress.verbs import make_plan, plan_table, run
from helpers.short_runs import GPTQ, RTN, SELF, recipe, recipe_file, text_source
from helpers.tiny_models import resized


@pytest.fixture
def run_size(tiny, tmp_path: Path) -> RunSize:
    """GPTQ on 48 x 2048 tokens of text in fp32, at the widths of a 7B model with two blocks."""
    plan = make_plan(recipe(GPTQ, calibration=text_source(tmp_path)), tiny("llama"))
    return wide(plan.run_size)


def wide(run_size: RunSize) -> RunSize:
    spec, width = run_size.spec, {64: 4096, 128: 11008}
    linears = [
        (replace(x, shape=(width.get(x.shape[0], 4096), width.get(x.shape[1], 4096))), scheme)
        for x, scheme in run_size.linears
    ]
    wider = resized(replace(spec, hidden=4096, context=4096), intermediate=11008)
    assert run_size.calibration is not None
    calibration = replace(run_size.calibration, samples=48, length=2048)
    return replace(
        run_size, spec=wider, linears=linears, calibration=calibration, dtype=torch.float32
    )


def peak(run_size: RunSize) -> int:
    return max(need.bytes for need in memory_needs(run_size) if need.required)


def test_what_is_far_too_much_is_refused_and_what_is_near_is_tried(run_size: RunSize) -> None:
    needed = peak(run_size)
    assert needed > 3e9
    check_room(run_size, Room(needed))
    assert memory_warnings(run_size, Room(needed)) == ()
    little = Room(int(needed / 1.05))
    check_room(run_size, little)
    (line,) = memory_warnings(run_size, little)
    assert line.startswith(f"quantizing needs {size(needed)} of memory, {size(little.bytes)} are")
    assert "it is tried, as the estimate is not exact; what would fit: " in line
    with pytest.raises(DataError, match=r"^quantizing needs .* of memory, .* are free; what would"):
        check_room(run_size, Room(int(needed / 1.11)))
    check_room(run_size, Room(None))


def test_what_this_process_has_is_not_taken_again(run_size: RunSize) -> None:
    """The tolerance is on what is still to be taken: of a process that holds much it is little."""
    held = 3 * 10**9
    whole = max(need.bytes for need in memory_needs(run_size, held))
    assert whole == held + peak(run_size) - TORCH_BYTES - TRANSFORMERS_BYTES
    check_room(run_size, Room(int(peak(run_size) / 1.08)))
    with pytest.raises(DataError):
        check_room(run_size, Room(int(whole / 1.08), held=held))


@pytest.mark.parametrize("share", [0.85, 0.7, 0.5])
def test_what_a_message_names_does_fit(run_size: RunSize, share: float) -> None:
    room = Room(int(share * peak(run_size)))
    with pytest.raises(DataError) as caught:
        check_room(run_size, room)
    named = str(caught.value).partition("what would fit: ")[2]
    assert named
    assert run_size.calibration is not None
    samples = re.search(r"calibration\.samples=(\d+)", named)
    if samples is not None:
        for more, fits in ((0, True), (1, False)):
            count = int(samples[1]) + more
            less = replace(run_size, calibration=replace(run_size.calibration, samples=count))
            assert (peak(less) <= room.bytes) == fits
    length = re.search(r"calibration\.length=(\d+)", named)
    if length is not None:
        less = replace(run_size, calibration=replace(run_size.calibration, length=int(length[1])))
        assert peak(less) <= room.bytes
    if "--dtype bf16" in named:
        assert peak(replace(run_size, dtype=torch.bfloat16)) <= room.bytes


def test_where_nothing_fits_the_least_is_named(run_size: RunSize) -> None:
    with pytest.raises(DataError, match="the least that any recipe needs for this model is") as no:
        check_room(run_size, Room(10**8))
    least = str(no.value).rpartition(" is ")[2]
    assert (
        0.3e9 < float(least.split()[0]) * {"MB": 1e6, "GB": 1e9}[least.split()[1]] < peak(run_size)
    )


def test_no_change_is_named_on_top_of_one_that_does_alone(tiny) -> None:
    own = {"kind": "self", "samples": 2, "length": 16}
    plan = make_plan(recipe(GPTQ, calibration=SELF, evaluation={"texts": [own]}), tiny("llama"))
    room = Room(max(x.bytes for x in memory_needs(wide(plan.run_size)) if x.required) // 2)
    with pytest.raises(DataError) as caught:
        check_room(wide(plan.run_size), room)
    assert str(caught.value).count("int4-rtn") <= 1


def test_what_only_the_report_needs_is_left_out(tiny) -> None:
    own = {"kind": "self", "name": "own", "samples": 128, "length": 128}
    run_size = make_plan(recipe(RTN, evaluation={"texts": [own]}), tiny("llama")).run_size
    needs = {need.part: need for need in memory_needs(run_size)}
    text = needs["evaluation text 'own'"]
    assert not text.required
    huge = replace(run_size, spec=replace(run_size.spec, vocab=1 << 20))
    assert {need.part for need in fitting_needs(huge, Room(1 << 60))} == set(needs)
    small = Room(int(next(x.bytes for x in memory_needs(huge) if x.part == text.part) / 1.2))
    (line,) = left_out(huge, small)
    assert line.startswith("evaluation text 'own' needs ")
    assert line.endswith(" are free: it will be left out")
    assert text.part not in {need.part for need in fitting_needs(huge, small)}


def test_what_evaluation_imports_counts_for_a_run_without_data(tiny) -> None:
    """transformers was tried before the first weight was read: 267 MB were planned, 510 taken."""
    own = {"kind": "self", "samples": 2, "length": 16}
    alone = make_plan(recipe(RTN), tiny("llama")).run_size
    measured = make_plan(recipe(RTN, evaluation={"texts": [own]}), tiny("llama")).run_size
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


def test_ids_of_calibration_tokens_take_memory(run_size: RunSize) -> None:
    """1e11 rows of 256 tokens were planned with 1 GB: what a block computes at once is bounded,
    and the ids of all tokens are not."""
    assert run_size.calibration is not None
    rows, length = 10**9, 256
    many = replace(run_size.calibration, samples=rows, length=length)
    ids = rows * length * torch.int64.itemsize
    assert all(need.bytes > ids for need in memory_needs(replace(run_size, calibration=many)))
    with pytest.raises(DataError, match=r"what would fit: --set calibration\.samples="):
        check_room(replace(run_size, calibration=many), Room(64 * 10**9))
