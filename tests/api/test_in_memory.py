"""A model in memory is compressed as its folder would be, and a run of it goes on or refuses."""

from pathlib import Path

import pytest
import torch

import compress
from compress.checkpoint import disk
from compress.errors import CheckpointError, DataError, OutputError
from helpers.short_runs import GPTQ, RTN, SELF, recipe

PLAIN = {"evaluation": None}


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
    assert not list(tmp_path.glob("*.source"))
    assert Path(report.source.path).name == source.name


def test_a_tokenizer_beside_it(tiny, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = loaded(tiny("llama"))
    tokenizer = AutoTokenizer.from_pretrained(tiny("llama"))
    model.name_or_path = ""
    model.config._name_or_path = ""
    asked = recipe(GPTQ, calibration=SELF, **PLAIN)
    report = compress.run(asked, (model, tokenizer), tmp_path / "out")
    assert Path(report.source.path).name == "LlamaForCausalLM"
    plan = compress.plan(asked, (model, tokenizer))
    assert plan.shards.total_bytes == report.result.bytes


def test_no_tokenizer_is_refused(tiny, tmp_path: Path) -> None:
    model = loaded(tiny("llama"))
    model.name_or_path = str(tmp_path)
    with pytest.raises(
        DataError, match=r"^no tokenizer is found where the model came from, .*; give"
    ):
        compress.run(recipe(RTN, **PLAIN), model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), 7, ("a", "b", "c")])
def test_what_is_no_model(tmp_path: Path, model: object) -> None:
    with pytest.raises(
        CheckpointError, match=r"^model is a \w+; it is a folder, a hub id, a model"
    ):
        compress.plan("int4-rtn", model)


def stop(monkeypatch: pytest.MonkeyPatch, model: object, out: Path) -> None:
    """A run that is interrupted behind its first blocks."""

    def interrupt(event: compress.Event) -> None:
        if event.stage == "quantize" and event.index == event.total - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress.run(recipe(GPTQ, calibration=SELF, **PLAIN), model, out, progress=interrupt)


def test_a_stopped_run_goes_on(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go_on = recipe(GPTQ, calibration=SELF, **PLAIN), compress.RunOptions(resume=True)
    compress.run(asked, tiny("llama"), tmp_path / "whole")
    stop(monkeypatch, loaded(tiny("llama")), tmp_path / "out")
    assert (tmp_path / "out.source").is_dir()
    other = loaded(tiny("llama"))
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1
    with pytest.raises(
        OutputError, match=r"^the model is another than the one in .*out\.source, wh"
    ):
        compress.run(asked, other, tmp_path / "out", options=go_on)
    # Another process has the model again.
    compress.run(asked, loaded(tiny("llama")), tmp_path / "out", options=go_on)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out"]


def test_without_what_was_saved_nothing_goes_on(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(monkeypatch, loaded(tiny("llama")), tmp_path / "out")
    disk.remove_tree(tmp_path / "out.source")
    with pytest.raises(OutputError, match=r"^nothing to resume: there is no whole model in "):
        compress.run(
            recipe(GPTQ, calibration=SELF, **PLAIN),
            loaded(tiny("llama")),
            tmp_path / "out",
            options=compress.RunOptions(resume=True),
        )


def test_a_folder_of_someone_else_is_left_alone(tiny, tmp_path: Path) -> None:
    (tmp_path / "out.source").mkdir()
    (tmp_path / "out.source" / "mine").write_text("mine")
    with pytest.raises(OutputError, match=r"out\.source is not empty and no model of an earlier"):
        compress.run(recipe(RTN, **PLAIN), loaded(tiny("llama")), tmp_path / "out")
    assert (tmp_path / "out.source" / "mine").read_text() == "mine"


def test_it_is_evaluated_and_opened(tiny, tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("once upon a time a small dog sat by the door " * 4)
    model = loaded(tiny("llama"))
    found = compress.evaluate(model, [str(words)])
    wanted = compress.evaluate(tiny("llama"), [str(words)])
    assert found.quality is not None
    assert wanted.quality is not None
    assert found.quality.texts[0].ppl_result == wanted.quality.texts[0].ppl_result
    sampling = compress.Sampling(max_tokens=4)
    (a,) = compress.open_model(model).generate(["once upon"], sampling)
    (b,) = compress.open_model(tiny("llama")).generate(["once upon"], sampling)
    assert a.tokens == b.tokens
