"""Where measured importance goes: a file that is whole or not there, and what is in the way."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import compress
from compress.artifacts.export import dry_artifact, export_artifact
from compress.artifacts.imatrix_place import ImatrixPlace, delivered
from compress.artifacts.plan import ArtifactTarget
from compress.artifacts.rounding import walk
from compress.checkpoint import Checkpoint, disk
from compress.cli.main import main
from compress.errors import CompressError, OutputError
from compress_exporters.exporter import Options
from compress_exporters.gguf.imatrix import read_imatrix
from compress_exporters.gguf.imatrix_write import Importance, write_imatrix
from helpers import tiny_models
from helpers.faults import Killed, counting, fault_at

STORY = "the old cat sat by the door and looked at the rain for a long time\n"
TYPE = "IQ4_NL"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("place") / "model", dtype="fp32")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "story.txt"
    file.write_text(STORY * 40)
    return file


Export = Callable[..., Any]


@pytest.fixture
def export(model: Path, text: Path, tmp_path: Path) -> Export:
    """An export into out/, with importance to a file."""

    def work(file: str, *, overwrite: bool = False, verify: bool = False, **more: Any) -> Any:
        how = Options(text=str(text), imatrix_out=str(tmp_path / file), **more)
        target = ArtifactTarget("gguf", how)
        return export_artifact(model, target, tmp_path / "out", verify=verify, overwrite=overwrite)

    return work


@pytest.fixture
def refused(export: Export, tmp_path: Path) -> Callable[..., str]:
    """Why an export is; it leaves nothing new."""

    def reason(file: str, **more: Any) -> str:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(CompressError) as problem:
            export(file, **more)
        assert sorted(tmp_path.rglob("*")) == before
        return str(problem.value).replace(f"{tmp_path}/", "")

    return reason


def test_the_report_names_the_file(export: Export, tmp_path: Path) -> None:
    report = export("a.gguf", type=TYPE)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.gguf", "out"]
    assert report.result["imatrix"] == str(tmp_path / "a.gguf")
    assert "a.gguf" not in report.result["files"]
    (note,) = (x for x in report.notes if "importance" in x)
    assert note == (
        "importance of the columns of 15 weights, measured on story.txt, goes to a.gguf, for"
        " llama-quantize --imatrix; what a block reads comes from those before it as they are"
        " rounded"
    )
    out = tmp_path / "out"
    stored = json.loads((out / "report" / "report.json").read_text())
    assert stored["result"]["imatrix"] == str(tmp_path / "a.gguf")
    page = (out / "report" / "report.md").read_text()
    assert f"  imatrix  {tmp_path / 'a.gguf'}\n" in page
    assert "goes to a.gguf" in (out / "README.md").read_text()
    assert "llama-quantize" not in page.partition("Start it")[2]


def test_weights_that_are_left_get_the_line_that_rounds_them(
    export: Export, tmp_path: Path
) -> None:
    for more, word, tail in (
        ({}, "--allow-requantize ", "; --embedding f16 leaves it all rounding"),
        ({"dtype": "fp16"}, "", ", for llama-quantize --imatrix"),
    ):
        report = export("a.gguf", overwrite=True, **more)
        (row,) = report.exports
        out = tmp_path / "out"
        assert row.open_with[-1] == (
            f"llama-quantize {word}--imatrix {tmp_path / 'a.gguf'} {out / 'model.gguf'}"
            f" {out}-Q4_K_M.gguf Q4_K_M"
        )
        assert any(x.endswith(tail) for x in report.notes)
        card = (out / "README.md").read_text()
        shown = "--imatrix a.gguf FOLDER/model.gguf FOLDER-Q4_K_M.gguf Q4_K_M"
        assert f"llama-quantize {word}{shown}" in card
        assert str(tmp_path) not in card


def test_a_dry_run_says_that_it_would_be_written(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.dat"
    asked = ["export", str(model), "--to", "gguf", "--text", str(text), "--dry-run"]
    assert main([*asked, "--imatrix-out", str(file)]) == 0
    said = capsys.readouterr().out
    assert f"  imatrix  {file}, which would be written\n" in said
    assert main([*asked, "--imatrix-out", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["written"], found["result"]["imatrix"]) == (False, str(file))
    assert main([*asked, "--type", TYPE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["imatrix"] is None
    assert not list(tmp_path.iterdir())


def test_from_the_command_line_and_from_python(model: Path, text: Path, tmp_path: Path) -> None:
    files = tmp_path / "a.gguf", tmp_path / "b.gguf"
    asked = ["export", str(model), "--to", "gguf", "--text", str(text), "--no-verify"]
    assert main([*asked, "-o", str(tmp_path / "a"), "--imatrix-out", str(files[0])]) == 0
    how = compress.ExportOptions(text=str(text), imatrix_out=str(files[1]), verify=False)
    report = compress.export(model, "gguf", tmp_path / "b", options=how)
    assert report.result["imatrix"] == str(files[1])
    assert files[0].read_bytes() == files[1].read_bytes()
    with pytest.raises(
        CompressError, match=r"^imatrix_out in options is x.gguf, and importance is"
    ):
        compress.export(model, "gguf", options=compress.ExportOptions(imatrix_out="x.gguf"))
    with pytest.raises(OutputError, match=r"^imatrix_out in options: .* is there; choose another"):
        compress.export(model, "gguf", tmp_path / "c", options=how)


REFUSED: dict[str, tuple[str, ...]] = {
    "no folder": (
        "nowhere/a.gguf",
        "--imatrix-out is nowhere/a.gguf, and nowhere does not exist; make it first,",
        " or choose another",
    ),
    "no form": (
        "a.imatrix",
        "--imatrix-out is a.imatrix; end its name in .gguf, or in .dat for the older form",
    ),
    "a model": (
        "model.gguf",
        "--imatrix-out is model.gguf, the name of a model; choose another",
    ),
    "below OUT": (
        "out/report/a.gguf",
        "--imatrix-out is out/report/a.gguf, which is the result's folder or below it;",
        " name a file in that folder or elsewhere",
    ),
    "a folder": ("taken.gguf", "--imatrix-out: taken.gguf is a folder; name a file in it"),
    "a file": (
        "there.gguf",
        "--imatrix-out: there.gguf is there; choose another name or add --overwrite",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_in_the_way(case: str, refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "taken.gguf").mkdir()
    (tmp_path / "there.gguf").write_bytes(b"mine")
    file, *reason = REFUSED[case]
    assert refused(file) == "".join(reason)


def test_only_importance_is_replaced(
    export: Export, refused: Callable[..., str], tmp_path: Path
) -> None:
    for content in (b"mine", (b"GGUF" + bytes(20))):
        (tmp_path / "a.gguf").write_bytes(content)
        assert refused("a.gguf", overwrite=True) == (
            "--imatrix-out: a.gguf is no importance matrix, and only those are replaced; choose"
            " another name"
        )
    (tmp_path / "a.gguf").unlink()
    export("a.gguf", type=TYPE)
    behind = (tmp_path / "a.gguf").read_bytes()
    export("a.gguf", overwrite=True)
    assert (tmp_path / "a.gguf").read_bytes() != behind
    assert read_imatrix(tmp_path / "a.gguf").keys()


def test_it_may_lie_in_the_result(export: Export, tmp_path: Path) -> None:
    """And goes with it, when it is replaced."""
    for file in ("out/a.gguf", "out/b.dat"):
        report = export(file, type=TYPE, overwrite=True)
        assert [x.name for x in tmp_path.iterdir()] == ["out"]
        assert Path(file).name in report.result["files"]
        assert {x.name for x in (tmp_path / "out").iterdir()} == {
            *report.result["files"],
            *("report", "README.md"),
        }
        assert read_imatrix(tmp_path / file)
        assert Checkpoint.open(tmp_path / "out").files == ("model.gguf",)
    assert report.result["bytes"] == (tmp_path / "out" / "model.gguf").stat().st_size


@pytest.mark.parametrize("where", ["_head", "export"])
def test_an_export_that_fails_leaves_no_file(
    where: str, export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(*_: object) -> None:
        raise KeyboardInterrupt

    if where == "_head":
        monkeypatch.setattr(walk, "_head", stops)
    else:  # all is written, and the proof fails
        monkeypatch.setattr("compress_exporters.gguf.target._compared", stops)
    with pytest.raises(KeyboardInterrupt):
        export("a.gguf", type=TYPE, verify=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("effect", ["before", "torn", "after", "enospc"])
def test_a_file_is_the_old_one_or_the_new(effect: Any, tmp_path: Path) -> None:
    old = {"blk.0.attn_q.weight": Importance(torch.ones(1, 4), torch.tensor([5]))}
    new = {"blk.0.attn_q.weight": Importance(torch.ones(1, 4) * 2, torch.tensor([7]))}
    target = tmp_path / "to.gguf"
    place = ImatrixPlace(target, inside=False, overwrite=True)

    def again() -> None:
        with delivered(place):
            write_imatrix(place.written_at(tmp_path / "out"), new, 512)
            assert target.read_bytes() == before

    write_imatrix(target, old, 512)
    before = target.read_bytes()
    with counting() as calls:
        again()
    after = target.read_bytes()
    assert before != after
    for number in range(len(calls)):
        write_imatrix(target, old, 512)
        try:
            with fault_at(number, effect):
                again()
        except OutputError:  # of a disk that is full: what was begun is gone
            assert list(tmp_path.glob("to.gguf*")) == [target]
            assert target.read_bytes() == before
        except Killed:
            pass
        assert target.read_bytes() in (before, after)


@pytest.mark.parametrize("place", ["imatrix.dat", "out/imatrix.dat"])
def test_a_file_of_the_source_of_that_name_is_another(
    place: str, model: Path, text: Path, tmp_path: Path
) -> None:
    """It is carried over as small files are, and what was measured is what was asked for."""
    source = Path(shutil.copytree(model, tmp_path / "model"))
    old = source / "imatrix.dat"
    write_imatrix(old, {"a": Importance(torch.ones(1, 4), torch.tensor([5]))}, 512, older=True)
    how = Options(text=str(text), imatrix_out=str(tmp_path / place))
    target = ArtifactTarget("gguf", how)
    report = export_artifact(source, target, tmp_path / "out", verify=False)
    assert len(read_imatrix(tmp_path / place)) == 15
    assert report.result["files"].count("imatrix.dat") == 1
    carried = (tmp_path / "out" / "imatrix.dat").read_bytes() == old.read_bytes()
    assert carried == (place == "imatrix.dat")


@pytest.mark.parametrize("fails", ["publishing", "room for it"])
@pytest.mark.parametrize("there", [True, False])
def test_it_appears_behind_the_result(
    fails: str, there: bool, export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result that does not come to be leaves the file of before, or none; and a disk without room
    for the file is told before the result appears."""
    file, old = tmp_path / "a.gguf", {"a": Importance(torch.ones(1, 4), torch.tensor([5]))}
    if there:
        write_imatrix(file, old, 512)
    before = {x: x.read_bytes() for x in tmp_path.iterdir()}
    plain = disk.rename, disk.open_write

    def rename(source: Path, target: Path) -> None:
        if target.name == "out":
            assert source.with_name("a.gguf.compress-tmp").is_file()
            raise OSError(errno.EIO, "broken")
        plain[0](source, target)

    def open_write(path: Path) -> int:
        if path.name.startswith(file.name):
            raise OSError(errno.ENOSPC, "full")
        return plain[1](path)

    if fails == "publishing":
        monkeypatch.setattr(disk, "rename", rename)
    else:
        monkeypatch.setattr(disk, "open_write", open_write)
    with pytest.raises(OutputError, match=r"cannot (publish .*out: broken|write .*a.gguf.*: full)"):
        export("a.gguf", overwrite=there)
    assert {x: x.read_bytes() for x in tmp_path.iterdir() if x.is_file()} == before
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_refused_behind_the_result_is_told(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = disk.rename

    def rename(source: Path, target: Path) -> None:
        if target.name == "a.gguf":
            raise OSError(errno.EIO, "broken")
        plain(source, target)

    monkeypatch.setattr(disk, "rename", rename)
    with pytest.raises(OutputError, match=r"a.gguf: broken; the export itself is there; look"):
        export("a.gguf")
    assert [x.name for x in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.gguf").is_file()


def test_a_file_that_came_meanwhile_stays(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = walk._head

    def comes(*args: Any) -> Any:
        (tmp_path / "a.gguf").write_bytes(b"mine")
        return plain(*args)

    monkeypatch.setattr(walk, "_head", comes)
    with pytest.raises(OutputError, match="is there; choose another name or add --overwrite"):
        export("a.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == b"mine"
    assert [x.name for x in tmp_path.iterdir()] == ["a.gguf"]


def test_what_it_needs_is_said(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["export", str(model), "--to", "gguf", "-o", str(tmp_path / "out")]
    for more in ([], ["--type", TYPE], ["--type", TYPE, "--imatrix", "b.gguf"]):
        assert main([*asked, "--imatrix-out", "a.gguf", *more]) == 2
        assert capsys.readouterr().err == (
            "error: --imatrix-out is a.gguf, and importance is measured on a text; give --text"
            " FILE\n"
        )
    onnx = ["export", str(model), "--to", "onnx", "--dry-run", "--imatrix-out", "a.gguf"]
    assert main(onnx) == 2
    assert "--imatrix-out is for gguf, and --to is onnx; leave it out" in capsys.readouterr().err
    for to, name in (("gguf", "nowhere/a.gguf"), ("onnx", "a.other")):  # ahead of its place
        with pytest.raises(CompressError, match=r"give --text FILE$|is for gguf"):
            dry_artifact(model, ArtifactTarget(to, Options(imatrix_out=name)))
    how = Options(imatrix_out="a.gguf", text=str(text))
    with pytest.raises(CompressError, match="--text is for gguf, and --to is onnx"):
        dry_artifact(model, ArtifactTarget("onnx", how))
    options = compress.ExportOptions(imatrix_out="a.gguf", dry_run=True)
    with pytest.raises(OutputError, match=r"^imatrix_out is 'a\.gguf', and gptq takes none"):
        compress.export(model, "gptq", options=options)
