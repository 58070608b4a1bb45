"""A fresh process of plain transformers gives the logits and ids that it should, or says why not.

What the process does is tested in this one, but for one test: it takes 6 s to start.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.checkpoint import Checkpoint
from compress.checkpoint.small_files import SmallFiles
from compress.errors import CheckpointError, CompressError, OutputError
from compress.formats import Weights, open_weights
from compress.proof import fresh_process, loads, needs, stock
from compress.proof.loads import SourceTokens, prove_load, question_of, source_tokens
from compress.proof.question import Answer, Question
from compress.runs.summary import FOLDER
from compress.verbs import run
from helpers import tiny_models
from helpers.short_runs import recipe

FOUR = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1]},
}
CAST, UNTIE = {"method": "cast", "dtype": "fp32"}, {"method": "untie"}


def opened(folder: Path) -> Weights:
    return open_weights(Checkpoint.open(folder))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_models.make("llama", tmp_path / "model", dtype="fp32")


def told(change: Callable[[Path], None], folder: Path, **options: bool) -> str | None:
    """What is answered of a folder that changed after our own reading."""
    asked = question_of(opened(folder), SourceTokens(), **options)
    change(folder)
    return stock.answer_to(asked).why_not


def set_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def set_tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return change


@pytest.mark.interop
def test_the_result_of_edits_loads_in_a_process_of_its_own(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tiny("llama", tied=True), tmp_path / "out"
    run(recipe(UNTIE, CAST), source, out)
    # Whoever imports from the folder of the model, or from the current one, ends.
    for name in ("torch.py", "transformers.py", "sitecustomize.py", "modeling_own.py"):
        (out / name).write_text("raise SystemExit('code of the folder ran')")
    set_config(auto_map={"AutoModelForCausalLM": "modeling_own.Own"})(out)
    monkeypatch.chdir(out)
    found = prove_load(opened(out), SmallFiles(source), tmp_path / "work")
    assert (found.model_class, found.proof) == ("LlamaForCausalLM", "logits")
    assert found.max_logit_error < 1e-4
    assert found.detail == ("AutoTokenizer gives the source's ids",)
    assert not (tmp_path / "work").exists()
    assert (out / FOLDER).is_dir()


@pytest.mark.parametrize("family", tiny_models.TABLED)
def test_names_shapes_and_first_block_of_every_family(family: str, tmp_path: Path) -> None:
    layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": 4}
    folder = tiny_models.make(family, tmp_path / "m", **layers, **FOUR.get(family, {}))
    question = question_of(opened(folder), SourceTokens(), first_block=True)
    answer = stock.answer_to(question)
    assert answer.why_not is None
    assert answer.relative_error < stock.BOUND


@pytest.mark.parametrize(
    ("family", "tied"), [("gemma2", True), ("gpt2", True), ("qwen3_moe", False)]
)
def test_the_whole_model(family: str, tied: bool, tmp_path: Path) -> None:
    folder = tiny_models.make(family, tmp_path / "m", tied=tied)
    question = question_of(opened(folder), SourceTokens())
    answer = stock.answer_to(question)
    assert answer.why_not is None
    assert answer.relative_error < stock.BOUND
    # The bound is one that another model does not keep.
    off = replace(question, logits=question.logits * (1 + 2 * stock.BOUND))
    assert "its logits differ" in str(stock.answer_to(off).why_not)


def test_tensors_of_no_decoder_may_be_left(tmp_path: Path, model: Path) -> None:
    set_tensors(lambda x: x.update({"vision.weight": torch.ones(2, 2)}))(model)
    weights = opened(model)
    assert weights.spec.copied == ("vision.weight",)
    for first_block in (False, True):
        question = question_of(weights, SourceTokens(), first_block=first_block)
        assert stock.answer_to(question).why_not is None
        strict = replace(question, asked=replace(question.asked, spare=[]))
        assert stock.answer_to(strict).why_not == "the class has no place for vision.weight"


GONE = set_tensors(lambda x: x.pop("model.layers.1.mlp.up_proj.weight"))
DAMAGES = {
    "missing": (GONE, "no tensor is in the files for model.layers.1.mlp.up_proj.weight"),
    "unknown": (
        set_tensors(lambda x: x.update(strange=torch.ones(1))),
        "the class has no place for strange",
    ),
    "epsilon": (set_config(rms_norm_eps=1e-3), "its logits differ from those that were computed"),
    "width": (
        set_config(intermediate_size=128),
        "model.layers.0.mlp.down_proj.weight is [64, 96], and the class asks for [64, 128]",
    ),
    "class": (set_config(model_type="nobody"), "nobody"),
    "vocabulary": (
        set_tensors(lambda x: x["model.norm.weight"].fill_(float("nan"))),
        "its logits differ from those that were computed of the same files by nan",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_wrong_is_told(damage: str, model: Path) -> None:
    change, words = DAMAGES[damage]
    assert words in str(told(change, model))


def test_what_is_wrong_without_memory_is_told(model: Path) -> None:
    asked = question_of(opened(model), SourceTokens(), first_block=True)

    def why_not(**shapes: list[int] | None) -> str | None:
        held = asked.asked.shapes | shapes
        kept = {name: shape for name, shape in held.items() if shape is not None}
        return stock.answer_to(replace(asked, asked=replace(asked.asked, shapes=kept))).why_not

    up, behind = "model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight"
    assert why_not(**{up: None}) == f"no tensor is in the files for {up}"
    assert why_not(**{behind: [96, 64]}) == f"the class has no place for {behind}"
    assert why_not(**{up: [64, 96]}) == f"{up} is [64, 96], and the class asks for [96, 64]"


def test_experts_that_are_missing_are_told_without_memory(tmp_path: Path) -> None:
    folder = tiny_models.make("mixtral", tmp_path / "m")
    asked = question_of(opened(folder), SourceTokens(), first_block=True)
    one = next(x for x in asked.asked.shapes if ".1." in x and ".experts.3.w2" in x)
    shapes = {name: shape for name, shape in asked.asked.shapes.items() if name != one}
    found = stock.answer_to(replace(asked, asked=replace(asked.asked, shapes=shapes)))
    assert "the files have 18,432 values for model.layers.1.mlp.experts.down_proj" in str(
        found.why_not
    )


@pytest.mark.usefixtures("answered_here")
def test_another_tokenizer_is_told(tmp_path: Path, model: Path) -> None:
    source = SmallFiles(shutil.copytree(model, tmp_path / "source"))
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    ids = source_tokens(source).ids[0]
    first, second = (next(k for k, v in vocabulary.items() if v == x) for x in ids[:2])
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match=r"AutoTokenizer reads .* otherwise than of the source"
    ):
        prove_load(opened(model), source, tmp_path / "work")
    assert not (tmp_path / "work").exists()


@pytest.mark.usefixtures("answered_here")
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # of qwen2 transformers makes an empty one
def test_no_tokenizer_is_fine_and_said(family: str, tmp_path: Path) -> None:
    folder = tiny_models.make(family, tmp_path / "m")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    found = prove_load(opened(folder), SmallFiles(folder), tmp_path / "work")
    assert found.proof == "logits"
    assert found.detail == ("ids not compared: the source has no tokenizer",)


def test_special_tokens_are_among_what_is_read(model: Path) -> None:
    found = source_tokens(SmallFiles(model))
    assert found.texts[-1] == "<|endoftext|>"
    assert found.ids[-1] == [0]
    assert all(found.ids)


def test_a_tokenizer_that_does_not_load_is_said(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    assert str(source_tokens(SmallFiles(model)).why_not).startswith(
        "no tokenizer of the source loads ("
    )


@pytest.mark.usefixtures("answered_here")
def test_without_memory_names_shapes_and_one_block(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "available_bytes", lambda: 10_000_000)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "left").write_text("of a run that was stopped")
    found = prove_load(opened(model), SmallFiles(model), tmp_path / "work")
    assert found.proof == "form"
    assert found.detail[0].endswith(
        "of memory are needed, 10.0 MB are free: compared were names and shapes of all tensors with"
        " the class, and the logits behind the first block"
    )


def test_the_memory_is_that_of_the_weights_in_fp32(model: Path) -> None:
    outline = loads.outline_of(Checkpoint.open(model))
    values = sum(x.numel for x in outline.tensors.values())
    largest = max(x.nbytes for x in outline.tensors.values())
    logits = 24 * 64 * 256  # both sides, and in fp64 twice
    assert needs.whole_bytes(outline) == needs.PROCESS + 4 * values + largest + logits


def answered(monkeypatch: pytest.MonkeyPatch, *found: object) -> None:
    """What processes come to, one after another: an exception, or what `subprocess.run` returns."""
    ends = iter(found)

    def ended(*_: object, **__: object) -> object:
        end = next(ends)
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(fresh_process.subprocess, "run", ended)


def ended_with(code: int, out: str = "", error: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.CompletedProcess([], code, out, error)


KILLED = ended_with(-signal.SIGKILL)
FINE = ended_with(0, "noise\n\n" + Answer("5.23.0", "LlamaForCausalLM").to_json() + "\n")


def test_a_process_that_is_killed_is_asked_for_less(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(monkeypatch, KILLED, FINE)
    found = prove_load(opened(model), SmallFiles(model), tmp_path / "work")
    assert found.proof == "form"
    assert "was killed, as by a system without memory" in found.detail[0]


ENDS = {
    "killed": (
        OutputError,
        "was killed, as by a system without memory; free memory",
        KILLED,
        KILLED,
    ),
    "late": (OutputError, r"within 300 s; go on with --resume", subprocess.TimeoutExpired([], 1)),
    "crashed": (
        CheckpointError,
        "ended with -11 and without an answer: it said nothing",
        ended_with(-signal.SIGSEGV),
    ),
    "failed": (
        CheckpointError,
        "ended with 1 and without an answer: ValueError: odd",
        ended_with(1, "{}", "Traceback\n  at\nValueError: odd\n"),
    ),
    "no process": (OutputError, "no process can be started", OSError(11, "try again")),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_without_an_answer_is_one_line(
    end: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, words, *found = ENDS[end]
    answered(monkeypatch, *found)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(kind, match=words) as caught:
        prove_load(opened(model), SmallFiles(model), tmp_path / "work")
    assert isinstance(caught.value, CompressError)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "work").exists()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("event", ["socket.connect", "socket.getaddrinfo"])
def test_the_process_reaches_for_no_network(event: str) -> None:
    with pytest.raises(PermissionError):
        stock._refuse_network(event, ())
    stock._refuse_network("open", ())


def test_a_question_is_what_was_asked(model: Path, tmp_path: Path) -> None:
    question = question_of(opened(model), SourceTokens(("a\u0301\n",), ([1, 2],)))
    (tmp_path / "q").write_bytes(question.to_bytes())
    read = Question.read(tmp_path / "q")
    assert read.asked == question.asked
    assert torch.equal(read.ids, question.ids)
    assert torch.equal(read.logits, question.logits)
