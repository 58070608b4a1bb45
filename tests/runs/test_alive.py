"""What other commands say of a folder that a run or an export is making: that it is alive."""

import re
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from compress.artifacts import in_place
from compress.checkpoint import Checkpoint, disk, prepare_output
from compress.cli.main import main
from compress.errors import CompressError
from compress.verbs import ArtifactTarget, RunOptions, export, export_artifact, run
from compress_exporters.exporter import Options
from compress_exporters.table import EXPORTERS
from conftest import tree_hashes
from helpers import tiny_models
from helpers.faults import OPERATIONS
from helpers.holding import alive, held_elsewhere
from helpers.short_runs import GPTQ, RTN, recipe, recipe_file, text_source

ALIVE = re.compile(
    r"another run of this process works in .*; wait for it to end, or choose another folder"
)
Ask = Callable[[], Any]


def at_every_change(monkeypatch: pytest.MonkeyPatch, ask: Ask) -> list[str]:
    """What `ask` is refused with before and behind every change of the disk, other than its own."""
    said: list[str] = []
    asking = False

    def asked() -> None:
        nonlocal asking
        if asking:
            return
        asking = True
        try:
            ask()
            said.append("")
        except CompressError as error:
            said.append(str(error))
        finally:
            asking = False

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            asked()
            result = real(*arguments)
            asked()
            return result

        return wrapper

    for name in OPERATIONS:
        monkeypatch.setattr(disk, name, wrapped(getattr(disk, name)))
    return said


def assert_alive(said: list[str]) -> None:
    """From when the folder is locked until it has gone; nothing is in the way before."""
    held = [i for i, line in enumerate(said) if ALIVE.fullmatch(line)]
    assert all(line == "" for line in said[: held[0]])
    assert held == list(range(held[0], held[-1] + 1))
    assert len(held) > 5


def test_a_run_is_alive_at_every_moment(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tiny("llama", num_hidden_layers=1), tmp_path / "out"
    run(recipe(RTN, seed=1), source, out)
    run(recipe(RTN), source, tmp_path / "alone")
    hows = cycle([{}, {"resume": True}, {"overwrite": True}, {"resumable": False}])
    said = at_every_change(monkeypatch, lambda: prepare_output(out, **next(hows)))
    run(recipe(RTN), source, out, options=RunOptions(overwrite=True))
    monkeypatch.undo()
    first = min(i for i, line in enumerate(said) if ALIVE.fullmatch(line))
    assert first < 10  # until then OUT.partial is empty, and OUT an older result
    assert len(said) > 200
    assert [line for line in said[first:] if not ALIVE.fullmatch(line)] == []
    assert weights(out) == weights(tmp_path / "alone")


def weights(out: Path) -> dict[str, str]:
    return {k: v for k, v in tree_hashes(out).items() if not k.startswith("report/")}


def test_commands_on_a_live_run(
    tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], compressed
) -> None:
    """A second command in the middle of a run, of any kind, ends and changes nothing."""
    source, out = tiny("llama"), tmp_path / "out"
    file = recipe_file(tmp_path, GPTQ, calibration=text_source(tmp_path))
    asked = ["run", str(file), "--model", str(source), "--out", str(out)]
    exporting = ["export", str(compressed()), "-o", str(out), "--to"]
    commands: list[list[str]] = [
        *([*asked, *more] for more in ([], ["--resume"], ["--overwrite"], ["--dry-run"])),
        [*asked, "--resume", "--dry-run"],
        *([*exporting, to] for to in ("gptq", "onnx", "gguf")),
        *([*exporting, to, "--dry-run"] for to in ("gptq", "onnx")),
        [*exporting, "onnx", "--overwrite"],
    ]
    run(file, source, tmp_path / "alone")
    ended = []

    def second(event: Any) -> None:
        if ended or event.unit != "block 0":
            return
        before = tree_hashes(tmp_path / "out.partial")
        for command in commands:
            capsys.readouterr()
            ended.append(main(command))
            told = "".join(capsys.readouterr())
            assert ALIVE.search(told), (command, told)
            assert "remove" not in told
        assert tree_hashes(tmp_path / "out.partial") == before

    run(file, source, out, progress=second)
    assert ended == [1 if "--dry-run" in x and x[0] == "run" else 2 for x in commands]
    assert weights(out) == weights(tmp_path / "alone")


@pytest.mark.parametrize("to", ["gptq", "gguf"])
def test_an_export_is_alive_at_every_moment(
    compressed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    source, out = compressed(), tmp_path / "out"
    said = at_every_change(monkeypatch, lambda: prepare_output(out, resumable=False))
    if to == "gptq":
        export(source, to, out)
    else:
        export_artifact(source, ArtifactTarget(to), out, verify=False)
    monkeypatch.undo()
    assert_alive(said)


def test_another_process_is_told_by_its_pid(
    tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "journal.json").write_text("{}")
    with held_elsewhere(tmp_path / "out.partial") as pid:
        asked = ["run", "int4-rtn", "--model", str(tiny("llama")), "--out", str(tmp_path / "out")]
        assert main(asked) == 2
    assert capsys.readouterr().err == f"error: {alive(tmp_path / 'out.partial', pid)}\n"


def test_ctrl_c_beside_a_live_run_offers_no_resume(
    tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is there, but is another's."""

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("compress.verbs.run", interrupted)
    partial = tmp_path / "out.partial"
    partial.mkdir()
    asked = ["run", "int4-rtn", "--model", str(tiny("llama")), "--out", str(tmp_path / "out")]
    with held_elsewhere(partial) as pid:
        assert main(asked) == 130
    assert capsys.readouterr().err == (
        f"stopped before anything was written; {alive(partial, pid)}\n"
    )


def test_an_export_in_place_is_alive_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.make("llama", tmp_path / "model", tied=True)
    checkpoint, how = Checkpoint.open(model), EXPORTERS["onnx"].in_place
    assert how is not None
    said = at_every_change(
        monkeypatch, lambda: in_place.prepare(how, checkpoint, 0, overwrite=False)
    )
    export_artifact(model, ArtifactTarget("onnx", Options(in_place=True)), verify=False)
    monkeypatch.undo()
    assert_alive(said)
