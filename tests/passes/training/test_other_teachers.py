"""Distillation by another model than the source: what it must be, what it does, what seals it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from compress.errors import CheckpointError, CompressError, OutputError
from compress.verbs import RunOptions, make_plan, run
from helpers import faults
from helpers.short_runs import GPTQ, recipe, result_of, text_source

pytestmark = pytest.mark.usefixtures("answered_here")
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
OTHER = {"hidden_size": 48, "num_hidden_layers": 3, "vocab_size": 320, "head_dim": 12}


def distill(teacher: Path | str, **options: Any) -> dict[str, Any]:
    few = {"tokens": 256, "batch": 4, "every": 4, "length": 8, "scope": "model"}
    return {"method": "distill", "teacher": str(teacher), **few, **options}


@pytest.mark.long
@pytest.mark.parametrize("scope", ["model", "block"])
def test_a_copy_of_the_source_teaches_what_the_source_does(
    tiny, tmp_path: Path, scope: str
) -> None:
    source, data = tiny("llama", **SMALL), text_source(tmp_path, samples=2, length=8)
    shutil.copytree(source, tmp_path / "copy")
    cut = {"method": "prune_width", "ffn": 24, "repair": "none"}
    for name, teacher in {"own": "source", "other": tmp_path / "copy"}.items():
        run(recipe(cut, distill(teacher, scope=scope), calibration=data), source, tmp_path / name)
    mine, theirs = (result_of(tmp_path / name) for name in ("own", "other"))
    assert mine["model.safetensors"] == theirs["model.safetensors"]


@pytest.mark.parametrize("cache", [8, pytest.param(0, marks=pytest.mark.long)])
def test_a_model_of_other_sizes_teaches(tiny, tmp_path: Path, cache: int) -> None:
    """Of another family, deeper, and with more padding behind the tokenizer's tokens."""
    source, data = tiny("llama", **SMALL), text_source(tmp_path, samples=2, length=8)
    asked = recipe(distill(tiny("mistral", **OTHER), cache=cache, rate=0.01), calibration=data)
    report = run(asked, source, tmp_path / "out")
    (course,) = report.stages[0].courses
    assert course.end < 0.9 * course.start
    own = recipe(distill("source", cache=cache), calibration=data)
    # Without what the process holds, which other tests change.
    need, less = (make_plan(x, source).run_size.edits[0].bytes for x in (asked, own))
    assert need >= less + (0 if cache else 4 * 3 * 48 * 96)


def test_a_killed_run_goes_on_with_no_other_teacher(tiny, tmp_path: Path) -> None:
    source, data = tiny("llama", **SMALL), text_source(tmp_path, samples=2, length=8)
    teacher = shutil.copytree(source, tmp_path / "teacher")
    asked = recipe(distill(teacher), calibration=data)
    with pytest.raises(faults.Killed), faults.fault_at(60):
        run(asked, source, tmp_path / "out")
    weights = load_file(teacher / "model.safetensors")
    changed = {name: value * 2 for name, value in weights.items()}
    save_file(changed, teacher / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OutputError, match=rf"another run: teacher {teacher} was \w+, is \w+;"):
        run(asked, source, tmp_path / "out", options=RunOptions(resume=True))


def test_what_cannot_teach_is_refused_before_work(tiny, tmp_path: Path) -> None:
    source, data = tiny("llama"), text_source(tmp_path)
    narrow = {"method": "prune_hidden", "hidden": 48}

    def said(teacher: Path | str, *first: dict[str, Any], **options: Any) -> str:
        with pytest.raises(CompressError) as caught:
            make_plan(recipe(*first, distill(teacher, **options), calibration=data), source)
        return str(caught.value)

    assert "stages[0].teacher: nowhere does not exist" in said("nowhere")
    shallow, wide = tiny("llama", num_hidden_layers=1), tiny("llama", **OTHER)
    block = {"scope": "block"}
    assert "stages[0].teacher: has layers 1 and the source 2; scope block" in said(shallow, **block)
    assert "has hidden 48 and the source 64" in said(wide, scope=["block", "model"])
    copied = shutil.copytree(source, tmp_path / "copy")
    assert "stages[1].teacher: has the source's residual stream, and" in said(
        copied, narrow, **block
    )
    assert "has a context of 128 tokens, and rows have 129" in said(copied, length=129)
    few = said(tiny("llama", vocab_size=64))
    assert "which knows 64 tokens of the tokenizer's" in few
    stored = json.loads((copied / "tokenizer.json").read_text())
    known = stored["model"]["vocab"]
    known["a"], known["b"] = known["b"], known["a"]
    (copied / "tokenizer.json").write_text(json.dumps(stored))
    wanted = f"is {copied}, which has another tokenizer than the source: token {known['b']} is 'b',"
    assert wanted in said(copied)
    run(recipe(GPTQ, calibration=data), source, tmp_path / "rounded")
    with pytest.raises(CheckpointError, match="which is quantized"):
        make_plan(recipe(distill(tmp_path / "rounded"), calibration=data), source)
