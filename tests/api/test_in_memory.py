"""A model in memory is compressed as its folder would be, and a run of it goes on or refuses."""

from pathlib import Path

import pytest
import torch

import compress
from compress.checkpoint import disk
from compress.errors import CheckpointError, DataError, OutputError
from compress.report.codec import read_json
from compress.report.summary import has_before
from compress.report.terminal.table import render_table
from compress.runs.output import disk_space
from helpers.short_runs import GPTQ, RTN, SELF, recipe

PLAIN = {"evaluation": None}
TEXTS = (".json", ".md", ".html", ".yaml")


def loaded(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def weights(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_the_bytes_are_those_of_its_folder(tiny, tmp_path: Path, family: str) -> None:
    source, asked = tiny(family), recipe(RTN, **PLAIN)
    compress.run(asked, source, tmp_path / "a")
    report = compress.run(asked, loaded(source), tmp_path / "b")
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != {}
    assert (tmp_path / "b" / "tokenizer.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir() if path != source) == ["a", "b"]
    assert report.source.path == f"{source.name} (in memory)"


def test_a_tokenizer_beside_it(tiny, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = loaded(tiny("llama"))
    tokenizer = AutoTokenizer.from_pretrained(tiny("llama"))
    model.name_or_path = ""
    model.config._name_or_path = ""
    asked = recipe(GPTQ, calibration=SELF, **PLAIN)
    report = compress.run(asked, (model, tokenizer), tmp_path / "out")
    assert report.source.path == "LlamaForCausalLM (in memory)"
    plan = compress.plan(asked, (model, tokenizer))
    assert plan.shards.total_bytes == report.result.bytes


def test_no_tokenizer_is_refused(tiny, tmp_path: Path) -> None:
    model = loaded(tiny("llama"))
    model.name_or_path = str(tmp_path)
    with pytest.raises(
        DataError, match=r"^no tokenizer is found where the model came from, .*; give"
    ):
        compress.run(recipe(RTN, **PLAIN), model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), 7, ("a", "b", "c")])
def test_what_is_no_model(tmp_path: Path, model: object) -> None:
    with pytest.raises(
        CheckpointError, match=r"^model is a \w+; it is a folder, a hub id, a model"
    ):
        compress.plan("int4-rtn", model)


ASKED = recipe(GPTQ, calibration=SELF, **PLAIN)
GO_ON = compress.RunOptions(resume=True)


def stop(model: object, out: Path) -> None:
    """A run that is interrupted behind its first blocks."""

    def interrupt(event: compress.Event) -> None:
        if event.stage == "quantize" and event.index == event.total - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress.run(ASKED, model, out, progress=interrupt)


def alone(folder: Path, source: Path) -> bool:
    """Whether a run has left nothing but its result, with no word of where the model was saved."""
    texts = [p.read_text() for p in (folder / "out").rglob("*") if p.suffix in TEXTS]
    return (
        len(texts) >= 5
        and not any("out.partial" in x or "out/source" in x for x in texts)
        and [p.name for p in folder.iterdir() if p not in (source, folder / "whole")] == ["out"]
    )


def test_a_stopped_run_goes_on(tiny, tmp_path: Path) -> None:
    source = tiny("llama")
    compress.run(ASKED, source, tmp_path / "whole")
    stop(loaded(source), tmp_path / "out")
    assert (tmp_path / "out.partial" / "source" / source.name / "config.json").is_file()
    other = loaded(source)
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1
    with pytest.raises(
        OutputError, match=r"^the model is another than the one in .*out\.partial/source, wh"
    ):
        compress.run(ASKED, other, tmp_path / "out", options=GO_ON)
    with pytest.raises(OutputError, match=r"out\.partial is left from a run that was stopped; rem"):
        compress.run(ASKED, loaded(source), tmp_path / "out")
    # Another process has the model again.
    compress.run(ASKED, loaded(source), tmp_path / "out", options=GO_ON)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert alone(tmp_path, source)


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_was_killed_before_it_began(tiny, tmp_path: Path, resume: bool) -> None:
    """What was saved is read again, or anew."""
    source, partial = tiny("llama"), tmp_path / "out.partial"
    stop(loaded(source), tmp_path / "out")
    for path in partial.iterdir():
        if path.name != "source":
            disk.remove_tree(path)
    compress.run(
        ASKED, loaded(source), tmp_path / "out", options=compress.RunOptions(resume=resume)
    )
    assert alone(tmp_path, source)


def test_a_run_that_only_has_to_be_published(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source went with the other working files."""
    source = tiny("llama")
    rename = disk.rename

    def stops(old: Path, new: Path) -> None:
        if new == tmp_path / "out":
            raise KeyboardInterrupt
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "rename", stops)
        with pytest.raises(KeyboardInterrupt):
            compress.run(ASKED, loaded(source), tmp_path / "out")
    assert not (tmp_path / "out.publishing" / "source").exists()
    compress.run(ASKED, loaded(source), tmp_path / "out", options=GO_ON)
    assert alone(tmp_path, source)


def test_a_refused_run_leaves_nothing(tiny, tmp_path: Path) -> None:
    """Nor does one that was stopped before it had finished anything."""
    source = tiny("llama")

    def interrupt(event: compress.Event) -> None:
        if event.stage == "calibrate":
            assert (tmp_path / "out.partial" / "source").is_dir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress.run(ASKED, loaded(source), tmp_path / "out", progress=interrupt)
    with pytest.raises(compress.CompressError, match="group_size"):
        compress.run(recipe({**RTN, "group_size": 48}, **PLAIN), loaded(source), tmp_path / "out")
    assert [path for path in tmp_path.iterdir() if path != source] == []


def test_what_was_saved_is_no_part_of_the_result(tiny, tmp_path: Path) -> None:
    plan, partial = compress.plan(ASKED, tiny("llama")), tmp_path / "out.partial"
    needed = disk_space(plan, partial, torch.float32).needed
    (partial / "source").mkdir(parents=True)
    (partial / "source" / "model.safetensors").write_bytes(bytes(1 << 20))
    # But for what the folder itself takes.
    assert 0 <= needed - disk_space(plan, partial, torch.float32).needed <= 1 << 13


def test_without_what_was_saved_nothing_goes_on(tiny, tmp_path: Path) -> None:
    stop(loaded(tiny("llama")), tmp_path / "out")
    disk.remove_tree(tmp_path / "out.partial" / "source")
    with pytest.raises(
        OutputError, match=r"^nothing to resume: there is no whole model in .*; rem"
    ):
        compress.run(ASKED, loaded(tiny("llama")), tmp_path / "out", options=GO_ON)


def test_a_folder_of_someone_else_is_left_alone(tiny, tmp_path: Path) -> None:
    mine = tmp_path / "out.partial" / "source" / "mine"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(OutputError, match=r"out\.partial is left from a run that was stopped"):
        compress.run(recipe(RTN, **PLAIN), loaded(tiny("llama")), tmp_path / "out")
    assert mine.read_text() == "mine"


def test_it_is_evaluated_and_opened(tiny, tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("once upon a time a small dog sat by the door " * 4)
    model = loaded(tiny("llama"))
    found = compress.evaluate(model, [str(words)])
    wanted = compress.evaluate(tiny("llama"), [str(words)])
    assert found.quality is not None
    assert wanted.quality is not None
    assert found.result.path == f"{tiny('llama').name} (in memory)"
    assert found.quality.texts[0].ppl_result == wanted.quality.texts[0].ppl_result
    sampling = compress.Sampling(max_tokens=4)
    (a,) = compress.open_model(model).generate(["once upon"], sampling)
    (b,) = compress.open_model(tiny("llama")).generate(["once upon"], sampling)
    assert a.tokens == b.tokens


def test_two_of_one_folder_are_two(tiny, tmp_path: Path) -> None:
    """They go by one name, and one is held against the other all the same."""
    (words := tmp_path / "words.txt").write_text("once upon a time a small dog sat " * 4)
    edited, original = loaded(tiny("llama")), loaded(tiny("llama"))
    with torch.no_grad():
        next(edited.parameters()).mul_(1.5)
    found = compress.evaluate(edited, [str(words)], tmp_path / "out", against=original)
    assert found.source.path == found.result.path == f"{tiny('llama').name} (in memory)"
    assert has_before(found)
    assert has_before(read_json(tmp_path / "out" / "report.json"))
    assert "before" in render_table(found)
    alone = compress.evaluate(edited, [str(words)])
    assert not has_before(alone)
    assert "before" not in render_table(alone)
