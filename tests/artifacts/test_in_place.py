"""Exports into the checkpoint's own folder: whole or not there, and nothing else is touched."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.artifacts import in_place
from compress.checkpoint import Checkpoint, disk
from compress.checkpoint.output import publishing
from compress.cli.main import main
from compress.errors import CheckpointError, CompressError, OutputError, RecipeError
from compress.formats import open_weights
from compress.verbs import ArtifactTarget, dry_artifact, export_artifact
from compress_exporters.exporter import Options
from compress_exporters.onnx.proof.running import Runner
from compress_exporters.reference import Reference
from helpers import tiny_models
from helpers.faults import Killed, counting, fault_at
from helpers.holding import alive, held_elsewhere

HERE = Options(in_place=True)
SHORT = Options(in_place=True, max_context=64)  # another graph, with other tables beside it
GRAPH = ("model.onnx", "model.onnx.data", "model.onnx.json")
WORK = "model.onnx.partial"
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("in_place") / "model", tied=True)


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A checkpoint with a README and a report that are not an export's."""
    return filled(original, tmp_path / "model")


def filled(original: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in original.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "README.md").write_text("a model")
    (folder / "report").mkdir()
    (folder / "report" / "report.json").write_text("{}")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """All files, without the seconds that a report tells."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    found = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return {name: b"" if name == GRAPH[2] else data for name, data in found.items()}


def add(model: Path, options: Options = HERE, **how: Any) -> Any:
    return export_artifact(model, ArtifactTarget("onnx", options), **{"verify": False, **how})


def runs(model: Path) -> bool:
    """Whether there is a graph, which then must be whole: it computes what it should."""
    if not (model / GRAPH[0]).exists():
        return False
    ids = list(range(1, 9))
    want = Reference.load(open_weights(Checkpoint.open(model))).logits(ids).numpy()
    found = Runner.open(model / GRAPH[0]).whole(np.array([ids]))[0]
    assert np.abs(found - want).max() < 1e-5
    return True


def test_a_graph_beside_the_weights(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(model)
    assert main(["export", str(model), "--to", "onnx", "--in-place"]) == 0
    told, after = capsys.readouterr().out, contents(model)
    assert set(after) == {*before, *GRAPH}
    assert {name: after[name] for name in before} == before
    assert not (model / WORK).exists()
    report = json.loads((model / GRAPH[2]).read_text())
    result, (row,) = report["result"], report["exports"]
    assert (result["path"], result["files"]) == (str(model), list(GRAPH[:2]))
    assert result["bytes"] == row["bytes"] == sum(len(after[name]) for name in GRAPH[:2])
    assert 0 < result["linked_bytes"] < len(before[FILE])
    assert row["proof"] == "tokens"
    assert " kB of the source stay where they are\n" in told
    assert f" weights (156 kB) in {FILE}\n" in told
    assert "proved   logits and greedy tokens are those of the stored weights" in told
    assert told.endswith(f"{model} (2 files, and the report)\n")


def test_the_dry_run_says_what_would_stay(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(model)
    assert main(["export", str(model), "--to", "onnx", "--in-place", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert " kB of the source stay where they are\n" in told
    assert told.endswith("nothing was written: this is a dry run\n")
    assert contents(model) == before
    assert dry_artifact(model, ArtifactTarget("onnx", HERE)).result["path"] == str(model)


def test_a_checkpoint_with_a_graph_is_read_as_before(model: Path, tmp_path: Path) -> None:
    add(model)
    report = export_artifact(model, ArtifactTarget("onnx"), tmp_path / "out", verify=False)
    assert report.result["linked_bytes"] == 0
    assert not (tmp_path / "out" / GRAPH[2]).exists()


def test_a_folder_that_a_link_leads_to(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    add(tmp_path / "link", verify=True)
    assert runs(tmp_path / "link")


def test_an_earlier_graph_is_replaced_where_that_is_asked(model: Path) -> None:
    add(model)
    with pytest.raises(OutputError, match=r"model.onnx is there; add --overwrite to replace it"):
        add(model, SHORT)
    first = contents(model)
    add(model, SHORT, overwrite=True)
    second = contents(model)
    assert set(second) == set(first) - {"model.onnx.data"} | {"model.onnx.data.2"}
    assert runs(model)
    add(model, overwrite=True)
    assert contents(model) == first


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress_exporters.onnx.proof.checks.LIMITS", {"fp32": 0.0})


def interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def ctrl_c(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("compress_exporters.onnx.proof.checks.require_form", ctrl_c)


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("compress_exporters.onnx.saving.ir.save", full)


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        (spoil, CheckpointError, "logits are not those of the weights"),
        (interrupt, KeyboardInterrupt, None),
        (fill_disk, OutputError, r"model.onnx: No space left on device; make room"),
    ],
    ids=["proof", "ctrl-c", "disk"],
)
@pytest.mark.parametrize("earlier", [False, True], ids=["first", "again"])
def test_what_fails_leaves_all_as_it_was(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
    error: type[BaseException],
    says: str | None,
    earlier: bool,
) -> None:
    if earlier:
        add(model)
    before = contents(model)
    fault(monkeypatch)
    with pytest.raises(error, match=says):
        add(model, SHORT, verify=True, overwrite=earlier)
    assert contents(model) == before
    assert not (model / WORK).exists()


@pytest.mark.parametrize(
    "earlier",
    [pytest.param(False, id="first", marks=pytest.mark.long), pytest.param(True, id="again")],
)
def test_a_kill_leaves_a_whole_graph_or_none(original: Path, tmp_path: Path, earlier: bool) -> None:
    """In front of every change of the disk, or amid it; the next export ends as if it were new."""
    whole = filled(original, tmp_path / "whole")
    if earlier:
        add(whole)
    with counting() as calls:
        add(whole, SHORT, overwrite=earlier)
    want, appeared = contents(whole), []
    untouched = {name: data for name, data in want.items() if not name.startswith(GRAPH[0])}
    for number in range(len(calls)):
        model = filled(original, tmp_path / str(number))
        if earlier:
            add(model)
        with pytest.raises(Killed), fault_at(number, "torn"):
            add(model, SHORT, overwrite=earlier)
        left = contents(model)
        assert {name: left[name] for name in untouched} == untouched
        appeared.append(left.get(GRAPH[0]) == want[GRAPH[0]])
        assert runs(model) == (earlier or appeared[-1])
        add(model, SHORT, overwrite=earlier or appeared[-1])
        assert runs(model)
        names = {name.removesuffix(".2") for name in want}
        assert {name.removesuffix(".2") for name in contents(model)} == names
        assert not (model / WORK).exists()
    assert sorted(appeared) == appeared
    assert len(set(appeared)) == 2


def test_a_kill_within_the_writing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are written by a package of its own, into a folder within the work's."""

    def killed(*args: object, **kwargs: object) -> None:
        (model / WORK / ".model.onnx.data.xyz").mkdir()
        (model / WORK / ".model.onnx.data.xyz" / "model.onnx.data").write_text("torn")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("compress_exporters.onnx.saving.convert_tensors_to_external", killed)
        with pytest.raises(Killed):
            add(model)
    assert (model / WORK).is_dir()
    add(model)
    assert runs(model)
    assert not (model / WORK).exists()


def test_two_at_a_time_are_refused(model: Path) -> None:
    (model / WORK).mkdir()
    (model / "model.onnx.json").write_text("{}")  # as any moment of the other may have left
    with held_elsewhere(model / WORK) as pid:
        for attempt in (dry_artifact, export_artifact):
            with pytest.raises(OutputError) as caught:
                attempt(model, ArtifactTarget("onnx", HERE))
            assert str(caught.value) == alive(model / WORK, pid)
    assert (model / WORK).is_dir()


def refusal(model: Path, **how: Any) -> str:
    """What the plan and the export say; neither changes anything."""
    before, said = contents(model), []
    for attempt in (dry_artifact, export_artifact):
        with pytest.raises(CompressError) as error:
            attempt(model, ArtifactTarget("onnx", HERE), **how)
        said.append(str(error.value))
    assert said[0] == said[1]
    assert "\n" not in said[0]
    assert contents(model) == before
    assert not (model / WORK).exists()
    return said[0]


@pytest.mark.parametrize("content", [b"theirs", b""], ids=["theirs", "nothing"])
def test_a_graph_of_another_tool_stays(model: Path, content: bytes) -> None:
    (model / GRAPH[0]).write_bytes(content)
    for overwrite in (False, True):
        said = refusal(model, overwrite=overwrite)
        assert said == (
            f"{model / GRAPH[0]} is not of compress-model, and only its graphs are replaced; move"
            " it away, or export with -o FOLDER instead"
        )


@pytest.mark.parametrize(
    "names",
    [
        ["model.onnx.data"],
        ["model.onnx.json"],
        ["model.partial.onnx", "model.onnx.data.2", "model.onnx.json"],
    ],
    ids=["data", "report", "several"],
)
def test_files_in_the_way_stay(model: Path, names: list[str]) -> None:
    for name in names:
        (model / name).write_text("theirs")
    said = refusal(model, overwrite=True)
    assert f"{model} has {', '.join(names)} without the graph to it, and the export would" in said
    assert said.endswith("; move them away, or export with -o FOLDER instead")


def file_there(place: Path) -> None:
    place.write_text("theirs")


def link_there(place: Path) -> None:
    (place.parent / "theirs").mkdir()
    (place.parent / "theirs" / "note").write_text("theirs")
    place.symlink_to("theirs")


def folder_there(place: Path) -> None:
    place.mkdir()
    (place / "note").write_text("theirs")


@pytest.mark.parametrize(
    ("put", "name"),
    [(file_there, WORK), (link_there, WORK), (folder_there, f"{WORK}/note")],
    ids=["file", "link", "folder"],
)
def test_what_is_in_the_way_of_the_work_stays(
    model: Path, put: Callable[[Path], None], name: str
) -> None:
    put(model / WORK)
    before = contents(model)
    for attempt in (dry_artifact, export_artifact):
        with pytest.raises(OutputError) as error:
            attempt(model, ArtifactTarget("onnx", HERE))
        assert str(error.value) == (
            f"{model} has {name}, where the export would do its work; move it away, or export with"
            " -o FOLDER instead"
        )
    assert contents(model) == before


def test_a_graph_of_another_tool_that_comes_meanwhile_stays(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(model)

    def meanwhile(_: Path) -> None:
        (model / GRAPH[0]).write_bytes(b"theirs")

    monkeypatch.setattr("compress_exporters.onnx.proof.checks.require_form", meanwhile)
    with pytest.raises(OutputError, match=r"model.onnx is not of compress-model, and only its"):
        add(model, verify=True, overwrite=True)
    after = contents(model)
    assert after[GRAPH[0]] == b"theirs"
    # Beside it, weights of this name may be its own.
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {GRAPH[0], GRAPH[1]}


def test_weights_of_a_hub_cache_are_refused(model: Path, tmp_path: Path) -> None:
    (model / FILE).rename(tmp_path / "blob")
    (model / FILE).symlink_to(tmp_path / "blob")
    said = refusal(model)
    assert said == (
        f"{model / FILE} is a link, as in a hub's cache, and readers of graphs follow none;"
        " export with -o FOLDER instead"
    )


def test_weights_with_two_names_are_refused(model: Path, tmp_path: Path) -> None:
    os.link(model / FILE, tmp_path / "copy")
    assert f"{model / FILE} has several names (hard links), and readers of graphs refu" in refusal(
        model
    )


def test_a_folder_that_cannot_be_written_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_place.os, "access", lambda path, mode: False)
    assert refusal(model) == f"{model} cannot be written to; export with -o FOLDER instead"


def test_too_little_disk_is_said_before(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "free_bytes", lambda folder: 1000)
    assert f"not enough disk space in {model}: " in refusal(model)


def test_a_folder_beside_is_refused(model: Path, tmp_path: Path) -> None:
    said = refusal(model, out=tmp_path / "out")
    assert said == (
        f"--in-place goes into the checkpoint's own folder, and --out is {tmp_path / 'out'}"
    )


def test_other_targets_are_refused(model: Path) -> None:
    with pytest.raises(RecipeError, match=r"^--in-place is for onnx, and --to is gguf; leave it"):
        dry_artifact(model, ArtifactTarget("gguf", HERE))


def test_the_command_line_refuses_it_as_usage(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for to in ("gguf", "onnx-genai", "tensorrt", "gptq"):
        assert main(["export", str(model), "--to", to, "--in-place"]) == 2
        said = capsys.readouterr().err
        assert f"--in-place is for onnx, and --to is {to}; leave it out" in said
    assert main(["export", str(model), "--to", "onnx", "--in-place", "-o", "out"]) == 2
    said = capsys.readouterr().err
    assert "--in-place goes into CHECKPOINT's own folder; leave --out out" in said


def test_a_disk_that_fails_at_the_end_says_that_the_graph_is_whole(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(source: Path, target: Path) -> None:
        if target.name == GRAPH[2] and target.parent == model:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.rename(source, target)

    monkeypatch.setattr(disk, "rename", failing)
    with pytest.raises(OutputError, match=r"cannot finish .*model.onnx, which is whole: Input/out"):
        add(model)
    assert runs(model)
