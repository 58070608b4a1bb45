"""The output folder is at any moment absent, the old one, or the whole new one."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.checkpoint import (
    claimed,
    create_partial,
    free_bytes,
    locked,
    prepare_output,
    publish,
    write_atomic,
)
from compress.checkpoint.output import folder as atomic
from compress.checkpoint.output import lock
from compress.errors import OutputError
from conftest import tree_hashes
from helpers.faults import Killed, counting, fault_at
from helpers.holding import alive, held_elsewhere

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"new weights",
    "recipe.yaml": b"name: x",
    "report/report.json": b"{1}",
}
# tokenizer.json: known by the report, which therefore must outlive it.
OLD = {
    **FILES,
    "LICENSE": b"free",
    "model.safetensors": b"old",
    "report/report.html": b"<html>",
    "report/report.json": b'{"copied_files": ["LICENSE", "tokenizer.json"]}',
    "tokenizer.json": b"{}",
}


def fill(partial: Path) -> None:
    """What a run leaves when its work is done: results, and working files of its own."""
    for name, data in {
        **FILES,
        "journal.jsonl": b"j",
        "spill/h0": b"0",
        "x.compress-tmp": b"",
    }.items():
        (partial / name).parent.mkdir(exist_ok=True)
        (partial / name).write_bytes(data)


def old_result(folder: Path) -> None:
    """A result of an earlier run."""
    (folder / "report").mkdir(parents=True)
    for name, data in OLD.items():
        (folder / name).write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def refusal(out: Path, **options: object) -> str:
    with pytest.raises(OutputError) as caught:
        prepare_output(out, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def run(out: Path, *, overwrite: bool = False, resume: bool = False) -> None:
    """A whole small run as `run` does it."""
    output = prepare_output(out, overwrite=overwrite, resume=resume)
    if output.state != "publish":
        create_partial(output)
        fill(output.partial)
    publish(output, ["journal.jsonl", "spill"])


def test_new_output_appears_whole(tmp_path: Path) -> None:
    output = prepare_output(tmp_path / "out")
    assert output.state == "fresh"
    assert list(tmp_path.iterdir()) == []
    run(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert contents(tmp_path / "out") == FILES
    assert not (tmp_path / "out" / "spill").exists()


def test_empty_output_and_empty_partial_are_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out.partial").mkdir()
    run(tmp_path / "out")
    assert contents(tmp_path / "out") == FILES


def test_overwrite_replaces_the_whole_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    old_result(out)
    assert "is not empty; choose another folder or add --overwrite" in refusal(out)
    run(out, overwrite=True)
    assert contents(out) == FILES
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_overwrite_leaves_a_folder_alone_that_is_no_result(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for name in ("Documents", "Pictures"):
        (home / name).mkdir(parents=True)
    for name in ("letter.odt", "notes.txt", "tax.pdf"):
        (home / name).write_text("mine")
    for overwrite in (False, True):
        assert refusal(home, overwrite=overwrite) == (
            f"{home} is not empty and no result of an earlier run (it holds 'Documents/',"
            " 'Pictures/', 'letter.odt' and 2 more), and only that is ever replaced; choose"
            " another folder or empty it"
        )
    assert len(list(home.iterdir())) == 5


@pytest.mark.parametrize(
    ("added", "shown"),
    [
        ("notes.txt", "notes.txt"),
        ("model.gguf", "model.gguf"),
        ("report/draft.md", "report/draft.md"),
        ("compress_model/model.safetensors", "compress_model/model.safetensors"),
        ("data/x", "data/"),
    ],
)
def test_overwrite_leaves_a_result_alone_that_holds_more(
    tmp_path: Path, added: str, shown: str
) -> None:
    out = tmp_path / "out"
    old_result(out)
    (out / "compress_model").mkdir()
    (out / "compress_model/outliers.safetensors").write_bytes(b"columns")
    assert prepare_output(out, overwrite=True).state == "fresh"
    (out / added).parent.mkdir(exist_ok=True)
    (out / added).write_text("mine")
    assert f"(it holds '{shown}')" in refusal(out, overwrite=True)


def test_overwrite_leaves_a_checkpoint_alone_that_no_run_made(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("from the hub")
    assert "(it holds 'config.json', 'model.safetensors')" in refusal(tmp_path, overwrite=True)


def test_a_folder_of_the_name_replaced_is_not_removed(tmp_path: Path) -> None:
    out, replaced = tmp_path / "out", tmp_path / "out.replaced"
    old_result(out)
    replaced.mkdir()
    (replaced / "mine.txt").write_text("mine")
    expected = f"{replaced} holds 'mine.txt', which no result has"
    assert expected in refusal(out, resume=True, overwrite=True)


def test_overwrite_looks_again_before_it_replaces(tmp_path: Path) -> None:
    out = tmp_path / "out"
    old_result(out)
    output = prepare_output(out, overwrite=True)
    create_partial(output)
    fill(output.partial)
    (out / "added.txt").write_text("during the run")
    with pytest.raises(OutputError, match=r"it holds 'added.txt'.* empty it, then run again with"):
        publish(output, ["journal.jsonl", "spill"])
    assert (out / "added.txt").exists()
    (out / "added.txt").unlink()
    run(out, overwrite=True, resume=True)
    assert contents(out) == FILES


def test_partial_needs_resume_even_with_overwrite(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill_into = tmp_path / "out.partial"
    fill_into.mkdir()
    fill(fill_into)
    for overwrite in (False, True):
        message = refusal(out, overwrite=overwrite)
        assert message == (
            f"{fill_into} is left from a run that was stopped; remove it to start again, or add"
            " --resume if this is the same run"
        )
    output = prepare_output(out, resume=True)
    assert (output.state, output.partial) == ("resume", fill_into)


def test_what_a_stopped_publication_left_is_said(tmp_path: Path) -> None:
    out, publishing, replaced = (tmp_path / f"out{x}" for x in ("", ".publishing", ".replaced"))
    run(out)
    out.rename(publishing)
    assert refusal(out) == (
        f"{publishing} holds the whole result of a run that was stopped before it became {out};"
        " add --resume to do that, or remove it to start again"
    )
    with pytest.raises(OutputError, match=f"; rename it to {out}, or remove it to start again$"):
        prepare_output(out, resumable=False)
    publishing.rename(out)
    run(replaced)
    assert refusal(out, overwrite=True) == (
        f"{replaced} is what {out} was before a run that was stopped at its very end, and {out} is"
        " its result; add --resume, which removes it"
    )
    with pytest.raises(OutputError, match=r"its result; remove it$"):
        prepare_output(out, resumable=False, overwrite=True)


def test_resume_with_nothing_to_resume(tmp_path: Path) -> None:
    out = tmp_path / "out"
    message = refusal(out, resume=True)
    assert f"nothing to resume: there is no {out}.partial; run without --resume" in message
    run(out)
    assert f"nothing to resume: {out} is there and" in refusal(out, resume=True)
    assert f"nothing to resume: {out} is there and" in refusal(out, resume=True, overwrite=True)


def test_resume_over_a_filled_output_asks_for_overwrite_before_work(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(out)
    shutil.copytree(out, tmp_path / "out.partial")
    assert "is not empty; choose another folder or add --overwrite" in refusal(out, resume=True)
    assert prepare_output(out, resume=True, overwrite=True).state == "resume"


def test_output_must_be_apart_from_the_model(tmp_path: Path) -> None:
    model = tmp_path / "a" / "model"
    model.mkdir(parents=True)
    (tmp_path / "alias").symlink_to(model)
    assert "is the model itself" in refusal(model, source=model)
    assert "is the model itself" in refusal(tmp_path / "alias", source=model, overwrite=True)
    assert "is inside the model's folder" in refusal(model / "out", source=model)
    assert "holds the model" in refusal(tmp_path / "a", source=model, overwrite=True)
    assert prepare_output(tmp_path / "a" / "model-w4", source=model).state == "fresh"


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    assert "file is a file; choose a folder" in refusal(tmp_path / "file")
    assert f"{tmp_path / 'no'} does not exist; make it first" in refusal(tmp_path / "no" / "out")
    assert "/proc is a mount point; choose a folder inside it" in refusal(Path("/proc"))
    assert "/ is a mount point" in refusal(Path("/"))
    (tmp_path / "link").symlink_to("file")
    assert "link leads to " in refusal(tmp_path / "link")
    assert "file, which is a file; choose a folder" in refusal(tmp_path / "link")
    monkeypatch.setattr(atomic.os, "access", lambda path, mode: False)
    assert f"{tmp_path} cannot be written to; choose another" in refusal(tmp_path / "out")


def test_partial_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out.partial").write_text("x")
    with pytest.raises(OutputError, match=r"cannot make .*out.partial: File exists"):
        create_partial(prepare_output(tmp_path / "out"))


def test_output_filled_during_the_run_is_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "out"
    output = prepare_output(out)
    create_partial(output)
    fill(output.partial)
    out.mkdir()
    (out / "theirs").write_text("theirs")
    with pytest.raises(
        OutputError, match=r"holds 'theirs'.* or empty it, then run again with --re"
    ):
        publish(output, ["journal.jsonl", "spill"])
    assert contents(out) == {"theirs": b"theirs"}
    assert prepare_output(out, resume=True).state == "publish"
    (out / "theirs").unlink()
    run(out, resume=True)
    assert contents(out) == FILES


@pytest.mark.usefixtures("no_fsync")
@pytest.mark.parametrize("effect", ["before", "after"])
@pytest.mark.parametrize("old", [False, True])
def test_kill_anywhere_while_publishing(tmp_path: Path, effect: str, old: bool) -> None:
    def start(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        if old:
            old_result(folder / "out")
        return folder / "out"

    out = start("count")
    with counting() as calls:
        run(out, overwrite=old)
    for number in range(len(calls)):
        out = start(str(number))
        with fault_at(number, effect), pytest.raises(Killed):
            run(out, overwrite=old)
        if out.exists():
            assert contents(out) in (FILES, OLD)
        left = {p.name for p in out.parent.iterdir() if any(p.iterdir())} - {"out"}
        resume = bool(left) or (out.parent / "out.replaced").exists()
        if resume or not out.exists() or contents(out) != FILES:
            run(out, overwrite=old, resume=resume)
        assert contents(out) == FILES
        assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_write_atomic_shows_old_or_new(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_atomic(path, b"old and longer")
    with counting() as calls:
        write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    for effect in ("before", "torn", "after"):
        for number in range(len(calls)):
            write_atomic(path, b"old and longer")
            with fault_at(number, effect), pytest.raises(Killed):
                write_atomic(path, b"new")
            assert path.read_bytes() in (b"old and longer", b"new")
    with fault_at(0, "enospc"), pytest.raises(OutputError, match=r"cannot write .*: No space left"):
        write_atomic(path, b"new")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path):
        second = locked(tmp_path)
        with pytest.raises(OutputError, match=f"another run of this process works in {tmp_path}"):
            second.__enter__()
    with held_elsewhere(tmp_path) as pid, pytest.raises(OutputError) as caught, locked(tmp_path):
        pass
    assert str(caught.value) == alive(tmp_path, pid)
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("name", ["out.partial", "out.publishing", "out"])
@pytest.mark.parametrize("how", [{}, {"overwrite": True}, {"resume": True}, {"resumable": False}])
def test_a_folder_that_a_process_works_in_is_alive(
    tmp_path: Path, name: str, how: dict[str, bool]
) -> None:
    """Whatever lies there: the advice to remove it would end in a run destroyed."""
    folder = tmp_path / name
    old_result(folder)
    with held_elsewhere(folder) as pid:
        assert refusal(tmp_path / "out", **how) == alive(folder, pid)
    assert "another process" not in refusal(tmp_path / "out")


def test_a_process_without_a_folder_for_its_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system tells no pid (another container's, macOS), the rest is said."""
    (tmp_path / "out.partial").mkdir()
    monkeypatch.setattr(lock.Path, "read_text", raising(PermissionError("/proc/locks")))
    with held_elsewhere(tmp_path / "out.partial"):
        assert refusal(tmp_path / "out").startswith("another process works in ")


def test_a_disk_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock.fcntl, "flock", raising(OSError(errno.ENOLCK, "No locks available")))
    output = prepare_output(tmp_path / "out")
    with pytest.raises(OutputError) as caught, claimed(output):
        pass
    assert str(caught.value) == (
        f"cannot lock {output.partial}: No locks available; choose a folder on a disk that has"
        " locks (flock)"
    )


def raising(error: Exception) -> Callable[..., Any]:
    def raises(*arguments: object, **options: object) -> Any:
        raise error

    return raises


def test_a_look_of_another_command_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask the lock is to have it for a moment; whoever wants it then tries again."""
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: os.close(fd))
    with locked(tmp_path):
        pass


def test_a_run_that_ended_while_this_one_opened_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is free then, but of a folder that has another name, or none."""
    folder = tmp_path / "out.partial"
    flock = fcntl.flock

    def renamed(fd: int, how: int) -> None:
        folder.rename(tmp_path / "out")
        flock(fd, how)

    folder.mkdir()
    monkeypatch.setattr(lock.fcntl, "flock", renamed)
    with pytest.raises(OutputError, match=r"ended just now; run this again$"), locked(folder):
        pass


@pytest.mark.parametrize("left", ["out.partial/journal.json", "out/config.json"])
def test_what_came_since_the_look_stays(tmp_path: Path, left: str) -> None:
    """A run looks, hashes its source for minutes, and then takes the folder."""
    output = prepare_output(tmp_path / "out")
    (tmp_path / left).parent.mkdir()
    (tmp_path / left).write_bytes(b"of another")
    with pytest.raises(OutputError) as caught, claimed(output):
        pass
    assert "remove" not in str(caught.value)
    assert contents(tmp_path) == {left: b"of another"}
    assert [p.name for p in tmp_path.iterdir()] == [left.partition("/")[0]]


def test_a_result_whose_run_is_at_its_very_end_is_not_moved(tmp_path: Path) -> None:
    out = tmp_path / "out"
    output = prepare_output(out, overwrite=True)
    create_partial(output)
    fill(output.partial)
    old_result(out)
    with held_elsewhere(out) as pid, pytest.raises(OutputError) as caught:
        publish(output, ["journal.jsonl", "spill"])
    assert str(caught.value) == alive(out, pid)
    assert contents(out) == OLD
    publish(output, ["journal.jsonl", "spill"])
    assert contents(out) == FILES


def test_free_bytes(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    assert abs(free_bytes(tmp_path) - stat.f_bavail * stat.f_frsize) < 1 << 30
    with pytest.raises(OutputError, match=r"cannot look at the disk of .*: No such file"):
        free_bytes(tmp_path / "no")


def test_tree_hashes_sees_every_byte(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    first = tree_hashes(tmp_path)
    (tmp_path / "a").write_text("2")
    assert tree_hashes(tmp_path) != first
