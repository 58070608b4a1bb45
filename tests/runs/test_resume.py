"""Killed anywhere, a resumed run gives the same bytes; another run's leftovers are refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compress.checkpoint import disk
from compress.errors import CompressError, OutputError
from compress.recipe import Recipe
from compress.verbs import RunOptions, run
from helpers import faults
from helpers.short_runs import (
    GPTQ,
    RTN,
    go_on,
    kill_at_each_fifth,
    recipe,
    result_of,
    text_source,
)

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}  # two blocks

# Every thirtieth operation; all of them in the long set.
SOME = (
    pytest.param(1, 30, id="some"),
    *(pytest.param(i, 5, marks=pytest.mark.long) for i in range(5)),
)


@pytest.mark.parametrize(("first", "step"), SOME)
def test_data_free_run_killed_at_a_write_fsync_or_rename(
    tiny, tmp_path: Path, first: int, step: int
) -> None:
    source = tiny("phi3", max_shard_size="100KB")
    asked = recipe(RTN, output={"shard_size": "60KB"})
    killed = kill_at_each_fifth(asked, source, tmp_path, first, step)
    assert killed.keys() >= {"pwrite", "fsync"}
    assert killed.total() > 150 / step


@pytest.mark.parametrize(("first", "step"), SOME)
def test_calibrated_run_killed_at_a_write_fsync_or_rename(
    tiny, tmp_path: Path, first: int, step: int
) -> None:
    asked = recipe(GPTQ, calibration=text_source(tmp_path, samples=2, length=8))
    source = tiny("phi3", num_key_value_heads=1, **SMALL)
    killed = kill_at_each_fifth(asked, source, tmp_path, first, step)
    assert killed.keys() >= {"pwrite", "fsync"}
    assert killed.total() > 200 / step


def test_nothing_is_recorded_before_it_is_on_the_disk(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut loses what was written and not synced; the journal must not speak of it."""
    dirty: set[str] = set()
    recorded = []

    def path_of(fd: int) -> str:
        return str(Path(f"/proc/self/fd/{fd}").resolve())

    def pwrite(fd: int, data: memoryview, offset: int, real: Any = disk.pwrite) -> int:
        dirty.add(path_of(fd))
        return int(real(fd, data, offset))

    def rename(source: Path, target: Path, real: Any = disk.rename) -> None:
        if target.name == "journal.json" or target.name == "out.publishing":
            recorded.append(target.name)
            assert not dirty, f"{target.name} is written before {dirty}"
        real(source, target)

    monkeypatch.setattr(disk, "pwrite", pwrite)
    monkeypatch.setattr(disk, "fsync", lambda fd: dirty.discard(path_of(fd)))
    monkeypatch.setattr(disk, "rename", rename)
    run(recipe(GPTQ, calibration=text_source(tmp_path)), tiny("llama"), tmp_path / "out")
    assert recorded.count("journal.json") == 6  # start, calibration, outside, embed, two blocks
    assert recorded[-1] == "out.publishing"


@pytest.mark.parametrize("number", [3, 40, 90])
def test_a_full_disk_is_one_line_and_resumable(tiny, tmp_path: Path, number: int) -> None:
    source, asked = tiny("phi3"), recipe(RTN)
    run(asked, source, tmp_path / "whole")
    out = tmp_path / "out"
    with pytest.raises(OutputError) as caught, faults.fault_at(number, "enospc"):
        run(asked, source, out)
    assert "No space left on device; make room or choose another disk" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not out.exists()
    go_on(asked, source, out)
    assert result_of(out) == result_of(tmp_path / "whole")


def killed_half_way(asked: Recipe, source: Path, out: Path, number: int = 60) -> None:
    with pytest.raises(faults.Killed), faults.fault_at(number):
        run(asked, source, out)
    assert (out.parent / "out.partial" / "journal.json").exists()


def refused(asked: Recipe, source: Path, out: Path, *, resume: bool = False) -> str:
    with pytest.raises(CompressError) as caught:
        run(asked, source, out, options=RunOptions(resume=resume))
    return str(caught.value)


def test_another_run_is_refused_with_the_difference(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tiny("llama"), tmp_path / "out"
    killed_half_way(recipe(RTN), source, out)
    partial = tmp_path / "out.partial"
    belongs = f"{partial} cannot be resumed, it belongs to another run: "
    remedy = "; remove it to start again"
    other = recipe({**RTN, "scheme": "W8A16"}, seed=5)
    assert refused(other, source, out, resume=True) == (
        f"{belongs}recipe.seed was 0, is 5; recipe.stages[0].scheme.bits was 4, is 8{remedy}"
    )
    line = refused(recipe(RTN), tiny("llama", seed=1), out, resume=True)
    assert line.startswith(f"{belongs}source.sha256 was ")
    from compress.machine import environment

    monkeypatch.setattr(environment.torch, "get_num_threads", lambda: 77)
    line = refused(recipe(RTN), source, out, resume=True)
    assert line.startswith(f"{belongs}environment.threads was ")
    assert line.endswith(f", is 77{remedy}")
    monkeypatch.undo()
    assert refused(recipe(RTN), source, out) == (
        f"{partial} is left from a run that was stopped; remove it to start again, or add --resume"
        " if this is the same run"
    )
    go_on(recipe(RTN), source, out)


def test_another_recipe_does_not_publish_a_finished_result(tiny, tmp_path: Path) -> None:
    source, out = tiny("llama"), tmp_path / "out"
    with faults.counting() as calls:
        run(recipe(RTN), source, tmp_path / "whole")
    renames = [i for i, name in enumerate(calls.names) if name == "rename"]
    with pytest.raises(faults.Killed), faults.fault_at(renames[-1]):
        run(recipe(RTN), source, out)
    assert (tmp_path / "out.publishing").is_dir()
    line = refused(recipe({**RTN, "group_size": 16}), source, out, resume=True)
    assert "recipe.stages[0].scheme.group_size was 32, is 16" in line
    report = run(recipe(RTN), source, out, options=RunOptions(resume=True))
    assert report.recipe.name == "test"
    assert result_of(out) == result_of(tmp_path / "whole")


def test_resuming_nothing_is_refused(tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert refused(recipe(RTN), tiny("llama"), out, resume=True) == (
        f"nothing to resume: there is no {tmp_path / 'out.partial'}; run without --resume to start"
    )
    run(recipe(RTN), tiny("llama"), out)
    assert refused(recipe(RTN), tiny("llama"), out, resume=True) == (
        f"nothing to resume: {out} is there and {tmp_path / 'out.partial'} is not, so the run had"
        " finished"
    )


def test_a_spoilt_journal_is_refused(tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed_half_way(recipe(RTN), tiny("llama"), out)
    journal = tmp_path / "out.partial" / "journal.json"
    journal.write_text("{")
    assert refused(recipe(RTN), tiny("llama"), out, resume=True) == (
        f"{journal} is not a journal; remove {journal.parent} and start again"
    )


def test_overwrite_keeps_the_old_result_until_the_new_one_is_whole(tiny, tmp_path: Path) -> None:
    source, out = tiny("llama"), tmp_path / "out"
    run(recipe(RTN), source, out)
    before = result_of(out)
    other = recipe({**RTN, "group_size": 16})
    with pytest.raises(faults.Killed), faults.fault_at(60):
        run(other, source, out, options=RunOptions(overwrite=True))
    assert result_of(out) == before
    run(other, source, out, options=RunOptions(overwrite=True, resume=True))
    run(other, source, tmp_path / "fresh")
    assert result_of(out) == result_of(tmp_path / "fresh")


def test_a_unit_nobody_wrote_is_noticed(tiny, tmp_path: Path) -> None:
    """Only what an earlier process recorded counts as written."""
    from compress.passes.quantize import stream

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "copy_tensors", lambda work, names: None)
        with pytest.raises(AssertionError, match="never written"):
            run(recipe(RTN), tiny("llama"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def gone(shard: Path) -> None:
    shard.unlink()


def shortened(shard: Path) -> None:
    with shard.open("r+b") as stream:
        stream.truncate(1000)


@pytest.mark.parametrize(("spoil", "state"), [(gone, "is missing"), (shortened, "has 1000 bytes")])
def test_shards_that_changed_between_kill_and_resume_are_refused(
    tiny, tmp_path: Path, spoil: Any, state: str
) -> None:
    """Files made anew would hold zeros where recorded units had written."""
    out = tmp_path / "out"
    killed_half_way(recipe(RTN), tiny("llama"), out)
    shard = tmp_path / "out.partial" / "model.safetensors"
    size = shard.stat().st_size
    spoil(shard)
    assert refused(recipe(RTN), tiny("llama"), out, resume=True) == (
        f"cannot resume: {shard} {state}, expected {size} bytes; remove {shard.parent} and start"
        " again"
    )
    assert not out.exists()


def test_a_shard_that_was_emptied_in_place_is_refused(tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with faults.counting() as calls:
        run(recipe(RTN), tiny("llama"), tmp_path / "whole")
    killed_half_way(recipe(RTN), tiny("llama"), out, len(calls) - 20)
    shard = tmp_path / "out.partial" / "model.safetensors"
    shard.write_bytes(bytes(shard.stat().st_size))
    line = refused(recipe(RTN), tiny("llama"), out, resume=True)
    assert line.startswith(f"{shard.parent} was changed while the run was stopped: ")
    assert line.endswith("; remove it and start again")


LAYER_OF_NOTHING = {"units": {"outside": [{"name": "x"}]}, "spent": {}}
NO_JOURNALS = [
    {"fingerprint": 3, "passes": {}},
    {"fingerprint": {}, "passes": []},
    {"fingerprint": {}, "passes": {"quantize": 3}},
    {"fingerprint": {}, "passes": {"quantize": LAYER_OF_NOTHING}},
]


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", *map(json.dumps, NO_JOURNALS)])
def test_other_texts_that_are_no_journal(tiny, tmp_path: Path, text: str) -> None:
    out = tmp_path / "out"
    killed_half_way(recipe(RTN), tiny("llama"), out)
    journal = tmp_path / "out.partial" / "journal.json"
    journal.write_text(text)
    assert "is not a journal; remove" in refused(recipe(RTN), tiny("llama"), out, resume=True)


def test_a_journal_that_is_a_folder_is_refused(tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed_half_way(recipe(RTN), tiny("llama"), out)
    journal = tmp_path / "out.partial" / "journal.json"
    journal.unlink()
    journal.mkdir()
    assert refused(recipe(RTN), tiny("llama"), out, resume=True) == (
        f"cannot read {journal}: Is a directory; remove {journal.parent} and start again"
    )


def test_a_resumed_run_reports_the_time_of_all_its_processes(tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed_half_way(recipe(RTN), tiny("llama"), out)
    journal = tmp_path / "out.partial" / "journal.json"
    held = json.loads(journal.read_text())
    part = held["passes"]["quantize"]
    assert 0 < part["spent"]["seconds"] < 100
    part["spent"] = {"seconds": 1000.0, "peak_rss_bytes": 1 << 50, "peak_gpu_bytes": None}
    journal.write_text(json.dumps(held))
    report = run(recipe(RTN), tiny("llama"), out, options=RunOptions(resume=True))
    assert 1000 < report.stages[0].seconds < 1100
    assert report.stages[0].peak_rss_bytes == 1 << 50
    assert any(line.startswith("the run was stopped and resumed: ") for line in report.warnings)
    whole = run(recipe(RTN), tiny("llama"), tmp_path / "whole")
    assert not any("resumed" in line for line in whole.warnings)


def missing(path: Path) -> None:
    path.unlink()


def broken(path: Path) -> None:
    path.write_bytes(b"x" * 20)


def killed_before_it(*arguments: Any, **named: Any) -> None:
    raise faults.Killed


def other_tokens(path: Path) -> None:
    save_file({"ids": torch.zeros((4, 16), dtype=torch.int64)}, path)


@pytest.mark.parametrize(("name", "spoil", "says"), [
    ("calibration.safetensors", missing, "cannot read {}: No such file or directory"),
    ("calibration.safetensors", broken, "{} is broken"),
    ("calibration.safetensors", other_tokens,
     "{} does not hold the tokens that the run began with"),
    ("hidden.0", missing, "cannot read {}: No such file or directory"),
    ("hidden.0", broken, "{} became shorter after it was opened"),
])  # fmt: skip
def test_spoilt_working_files_are_refused(
    tiny, tmp_path: Path, name: str, spoil: Any, says: str
) -> None:
    asked, out = recipe(GPTQ, calibration=text_source(tmp_path)), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compress.passes.quantize.calibrated._block", killed_before_it)
        with pytest.raises(faults.Killed):
            run(asked, tiny("llama"), out)
    path = tmp_path / "out.partial" / name
    spoil(path)
    assert refused(asked, tiny("llama"), out, resume=True) == (
        f"{says.format(path)}; remove {path.parent} and start again"
    )


def copy_of(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    (target / "chat_template.jinja").write_text("{{ messages }}")
    (target / "generation_config.json").write_text("{}")
    return target


def test_other_side_files_are_another_run(tiny, tmp_path: Path) -> None:
    """They are part of the result: half of each would be neither."""
    source, out = copy_of(tiny("llama"), tmp_path / "model"), tmp_path / "out"
    killed_half_way(recipe(RTN), source, out)
    (source / "chat_template.jinja").write_text("{{ other }}")
    (source / "generation_config.json").unlink()
    (source / "vocab.json").write_text("{}")
    line = refused(recipe(RTN), source, out, resume=True)
    assert "belongs to another run: source.chat_template.jinja was " in line
    assert re.search(r"; source\.generation_config\.json was \w+, is absent", line)
    assert "; source.vocab.json was absent, is " in line


def test_other_side_files_do_not_publish_a_finished_result(tiny, tmp_path: Path) -> None:
    source, out = copy_of(tiny("llama"), tmp_path / "model"), tmp_path / "out"
    with faults.counting() as calls:
        run(recipe(RTN), source, tmp_path / "whole")
    last = max(i for i, name in enumerate(calls.names) if name == "rename")
    with pytest.raises(faults.Killed), faults.fault_at(last):
        run(recipe(RTN), source, out)
    (source / "chat_template.jinja").write_text("{{ other }}")
    line = refused(recipe(RTN), source, out, resume=True)
    assert "belongs to another run: source.chat_template.jinja was " in line
    (tmp_path / "out.publishing" / "recipe.yaml").unlink()
    assert "recipe.yaml; remove" in refused(recipe(RTN), source, out, resume=True)


def test_a_link_that_leads_out_is_named_in_the_warnings(tiny, tmp_path: Path) -> None:
    source = copy_of(tiny("llama"), tmp_path / "model")
    (tmp_path / "secret").write_text("key")
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    report = run(recipe(RTN), source, tmp_path / "out")
    left = "notes.txt (a link that leads outside the folder)"
    assert left in report.skipped_files
    assert f"left behind: {left}" in report.warnings
    assert not (tmp_path / "out" / "notes.txt").exists()
