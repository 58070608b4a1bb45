"""A source that changes while a run reads it ends the run in a line; nothing is published."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from compress.checkpoint import Checkpoint
from compress.checkpoint.seal import Seal
from compress.cli.main import main
from compress.errors import CheckpointError
from compress.events import Event
from compress.verbs import EvaluationOptions, RunOptions, evaluate_checkpoint, run
from conftest import tree_hashes
from helpers.faults import Killed
from helpers.short_runs import GPTQ, RTN, SELF, recipe, recipe_file, text_source

AGAIN = "leave a model alone while it is read, and run this again"
Change = Callable[[Path], None]


@pytest.fixture
def source(tiny, tmp_path: Path) -> Path:
    """A model of its own, with files that a tokenizer and a result have."""
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def flipped(name: str) -> Change:
    """One bit of a tensor, in place: its first value stays finite."""

    def change(source: Path) -> None:
        info = Checkpoint.open(source).tensors[name]
        with (source / info.file).open("r+b") as stream:
            stream.seek(info.start)
            byte = stream.read(1)[0]
            stream.seek(info.start)
            stream.write(bytes([byte ^ 1]))

    return change


def written(name: str, content: str = "{}") -> Change:
    def change(source: Path) -> None:
        (source / name).write_text(content)

    return change


def removed(name: str) -> Change:
    def change(source: Path) -> None:
        (source / name).unlink()

    return change


def vanished(source: Path) -> None:
    source.rename(source.with_name("elsewhere"))


def truncated(source: Path) -> None:
    os.truncate(source / "model.safetensors", 2000)


def at(unit: str, change: Change, source: Path, stage: str | None = None) -> Callable[..., None]:
    """A listener that changes the source when a unit was finished, once."""
    waiting = [change]

    def listen(event: Event) -> None:
        if waiting and event.unit == unit and stage in (None, event.stage):
            waiting.pop()(source)

    return listen


def ended(asked: Any, source: Path, out: Path, **how: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        run(asked, source, out, **how)
    assert not out.exists()
    assert not out.with_name("out.publishing").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


LATE, EARLY = "model.layers.1.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight"
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
SAYS = "tensor {!r} in {}/model.safetensors changed after it was hashed; " + AGAIN


def half(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """All pairs; by default half of them, with each row and each column."""
    return [
        pytest.param(row, column, marks=() if (i - j) % len(columns) < len(columns) // 2
                     else pytest.mark.long)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]  # fmt: skip


UNITS = ("source hashed", "tensors outside the blocks", "block 0", "block 1")


@pytest.mark.parametrize(("unit", "name"), half(UNITS, (LATE, EARLY, EMBEDDING, NORM)))
def test_weights_that_flip_in_a_data_free_run(
    source: Path, tmp_path: Path, unit: str, name: str
) -> None:
    """Whether they were read by then or not: the report says what lies there."""
    listen = at(unit, flipped(name), source)
    assert ended(recipe(RTN), source, tmp_path / "out", progress=listen) == (
        SAYS.format(name, source)
    )


@pytest.mark.parametrize("unit", ["source hashed", "texts read"])
def test_the_read_itself_is_refused(
    source: Path, tmp_path: Path, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only a last look, which a file that was put back in time would pass."""
    monkeypatch.setattr(Checkpoint, "require_unchanged", lambda checkpoint: None)
    asked = recipe(RTN, evaluation=evaluated(tmp_path))
    listen = at(unit, flipped(LATE), source)
    assert ended(asked, source, tmp_path / "out", progress=listen) == SAYS.format(LATE, source)


@pytest.mark.parametrize(
    ("unit", "name"),
    half(("all tokens drawn", "embedded tokens", "block 0"), (LATE, EMBEDDING)),
)
def test_weights_that_flip_in_a_calibrated_run(
    source: Path, tmp_path: Path, unit: str, name: str
) -> None:
    asked = recipe(GPTQ, calibration=text_source(tmp_path))
    listen = at(unit, flipped(name), source)
    assert ended(asked, source, tmp_path / "out", progress=listen) == SAYS.format(name, source)


def evaluated(folder: Path) -> dict[str, Any]:
    text = text_source(folder)["sources"][0]
    return {"texts": [text], "window": 32, "samples": {"prompts": ["once"], "tokens": 4}}


@pytest.mark.parametrize(("change", "says"), [
    (flipped(EARLY), SAYS.replace("{!r}", repr(EARLY))),
    (written("tokenizer.json"), "{}/tokenizer.json changed after it was hashed; " + AGAIN),
    (written("config.json"), "{}/config.json changed after it was hashed; " + AGAIN),
    (vanished, "cannot read {}/"),
])  # fmt: skip
@pytest.mark.parametrize("unit", ["block 1", "texts read"])
def test_a_source_that_changes_before_the_evaluation(
    source: Path, tmp_path: Path, change: Change, says: str, unit: str
) -> None:
    """All is quantized by then: only what it is compared with is another."""
    asked = recipe(RTN, evaluation=evaluated(tmp_path))
    listen = at(unit, change, source)
    said = ended(asked, source, tmp_path / "out", progress=listen)
    assert said.startswith(says.format(source))
    assert (tmp_path / "out.partial" / "journal.json").exists()  # a source put back can go on


@pytest.mark.parametrize("name", [
    "tokenizer.json", "config.json", "generation_config.json", "chat_template.jinja"])  # fmt: skip
@pytest.mark.parametrize("change", [written, removed])
def test_side_files_that_change(source: Path, tmp_path: Path, name: str, change: Any) -> None:
    for unit in ("source hashed", "block 1"):
        out = tmp_path / unit / "out"
        out.parent.mkdir()
        model = Path(shutil.copytree(source, out.parent / "model"))
        said = ended(recipe(RTN), model, out, progress=at(unit, change(name), model))
        assert said.startswith(
            f"{model / name} changed after it was hashed; {AGAIN}"
            if change is written
            else f"cannot read {model / name}: No such file"
        )


@pytest.mark.parametrize("change", [vanished, truncated])
@pytest.mark.parametrize(("stage", "unit"), [
    *(("data-free", unit) for unit in ("source hashed", "block 0", "block 1")),
    ("calibrated", "block 0"),
    *(pytest.param("calibrated", x, marks=pytest.mark.long) for x in ("source hashed", "block 1")),
])  # fmt: skip
def test_a_folder_that_vanishes_and_a_file_that_shrinks(
    source: Path, tmp_path: Path, change: Change, unit: str, stage: str
) -> None:
    asked = recipe(RTN)
    if stage == "calibrated":
        asked = recipe(GPTQ, calibration=text_source(tmp_path))
    said = ended(asked, source, tmp_path / "out", progress=at(unit, change, source))
    assert str(source) in said


def test_a_tokenizer_that_changes_before_calibration(source: Path, tmp_path: Path) -> None:
    asked = recipe(GPTQ, calibration=text_source(tmp_path))
    for change in (written("tokenizer.json"), written("tokenizer_config.json")):
        shutil.copytree(source, model := tmp_path / "copy", dirs_exist_ok=True)
        listen = at("source hashed", change, model)
        said = ended(asked, model, tmp_path / "out", progress=listen)
        assert said.endswith(f".json changed after it was hashed; {AGAIN}")


def test_config_that_changes_before_it_is_hashed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was parsed by then, and the plan made of it."""
    sealed = Checkpoint.sealed

    def late(checkpoint: Checkpoint) -> Checkpoint:
        with (source / "config.json").open("a") as stream:
            stream.write(" ")
        return sealed(checkpoint)

    monkeypatch.setattr(Checkpoint, "sealed", late)
    assert ended(recipe(RTN), source, tmp_path / "out") == (
        f"{source / 'config.json'} changed after it was opened; {AGAIN}"
    )


def killed_at(unit: str) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        if event.unit == unit:
            raise Killed

    return listen


@pytest.mark.parametrize(("change", "says"), [
    (flipped(LATE), SAYS.replace("{!r}", repr(LATE))),
    (flipped(EMBEDDING), SAYS.replace("{!r}", repr(EMBEDDING))),
    (written("tokenizer.json"), "{}/tokenizer.json changed after it was hashed; " + AGAIN),
])  # fmt: skip
def test_a_source_that_changes_under_resume(
    source: Path, tmp_path: Path, change: Change, says: str
) -> None:
    out, copy = tmp_path / "out", Path(shutil.copytree(source, tmp_path / "copy"))
    run(recipe(RTN), source, tmp_path / "whole")
    with pytest.raises(Killed):
        run(recipe(RTN), source, out, progress=killed_at("block 0"))
    listen = at("source hashed", change, source)
    said = ended(recipe(RTN), source, out, options=RunOptions(resume=True), progress=listen)
    assert said == says.format(source)
    shutil.copytree(copy, source, dirs_exist_ok=True)  # put back
    run(recipe(RTN), source, out, options=RunOptions(resume=True))
    assert weights(out) == weights(tmp_path / "whole")


def weights(out: Path) -> dict[str, str]:
    return {k: v for k, v in tree_hashes(out).items() if not k.startswith("report/")}


def test_the_command_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    path, out = recipe_file(tmp_path, RTN), tmp_path / "out"
    require = Seal.require_unchanged

    def late(seal: Seal, *arguments: Any) -> None:
        flipped(EARLY)(source)
        require(seal, *arguments)

    monkeypatch.setattr(Seal, "require_unchanged", late)
    assert main(["run", str(path), "--model", str(source), "--out", str(out)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {SAYS.format(EARLY, source)}"
    assert not out.exists()


def test_an_evaluation_whose_source_changes(source: Path, tmp_path: Path) -> None:
    """Its report has the sha256 of the source, too."""
    run(recipe(RTN), source, tmp_path / "small")
    (tmp_path / "text.txt").write_text("once upon a time " * 40)
    listen = at("block 0", flipped(LATE), source)
    with pytest.raises(CheckpointError) as caught:
        evaluate_checkpoint(
            tmp_path / "small",
            EvaluationOptions(texts=[str(tmp_path / "text.txt")]),
            against=source,
            progress=listen,
        )
    assert str(caught.value) == SAYS.format(LATE, source)


def test_text_of_the_models_own(source: Path, tmp_path: Path) -> None:
    """The whole model is read at once for it."""
    asked = recipe(GPTQ, calibration=SELF)
    listen = at("source hashed", flipped(NORM), source)
    assert ended(asked, source, tmp_path / "out", progress=listen) == SAYS.format(NORM, source)


def test_a_source_that_stays_is_no_hindrance(source: Path, tmp_path: Path) -> None:
    """Files that are written anew with what they had, and others that come."""
    content = (source / "model.safetensors").read_bytes()

    def again(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(content)
        (folder / "notes.txt").write_text("mine")

    run(recipe(RTN), source, tmp_path / "out", progress=at("block 0", again, source))
    assert not (tmp_path / "out" / "notes.txt").exists()
