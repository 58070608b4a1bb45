"""What cannot work is refused in one line before any work, and leaves nothing behind."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import CheckpointError, CompressError, DataError, OutputError, RecipeError
from compress.report.units import size
from compress.runs import output
from compress.verbs import RunOptions, make_plan, run
from helpers.short_runs import GPTQ, RTN, SELF, recipe, recipe_file, text_source

WEIGHTS = "model.safetensors"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def source(tiny, tmp_path: Path) -> Path:
    """A llama that a test may damage."""
    return Path(shutil.copytree(tiny("llama"), tmp_path / "source"))


def refused(asked: Any, model: Path, kind: type[CompressError], **options: Any) -> str:
    """The message of a run that must leave neither OUT nor OUT.partial."""
    out = model.parent / "out"
    with pytest.raises(kind) as caught:
        run(asked, model, out, options=RunOptions(**options))
    message = str(caught.value)
    assert "\n" not in message
    assert not out.exists()
    assert not (model.parent / "out.partial").exists()
    return message


def change(source: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(source / WEIGHTS)
    edit(tensors)
    save_file(tensors, source / WEIGHTS, metadata={"format": "pt"})


def change_config(source: Path, **keys: Any) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **keys}))


def test_an_already_quantized_source(source: Path) -> None:
    change_config(source, quantization_config={"quant_method": "awq", "bits": 4})
    assert refused(recipe(RTN), source, CheckpointError) == (
        f"{source} is already quantized (awq); give the original checkpoint"
    )


def test_our_own_result_as_a_source(tiny, tmp_path: Path) -> None:
    run(recipe(RTN), tiny("llama"), tmp_path / "source")
    assert refused(recipe(RTN), tmp_path / "source", CheckpointError) == (
        f"{tmp_path / 'source'} is already quantized (compressed-tensors); give the original"
        " checkpoint"
    )


def test_pickles(source: Path) -> None:
    (source / WEIGHTS).unlink()
    (source / "pytorch_model.bin").write_bytes(b"x")
    line = refused(recipe(RTN), source, CheckpointError)
    assert "pytorch_model.bin" in line
    assert "save_pretrained" in line or "convert" in line


def test_a_missing_shard(tiny, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny("llama", max_shard_size="100KB"), tmp_path / "source"))
    last = sorted(source.glob("model-*.safetensors"))[-1]
    last.unlink()
    assert last.name in refused(recipe(RTN), source, CheckpointError)


def test_a_truncated_shard(source: Path) -> None:
    os.truncate(source / WEIGHTS, (source / WEIGHTS).stat().st_size - 1)
    assert WEIGHTS in refused(recipe(RTN), source, CheckpointError)


def test_a_missing_tensor(source: Path) -> None:
    change(source, lambda tensors: tensors.pop(DOWN))  # type: ignore[arg-type, return-value]
    assert refused(recipe(RTN), source, CheckpointError) == (
        f"tensor {DOWN} is missing; the checkpoint is incomplete or config.json belongs to another"
        " model"
    )


def test_a_tensor_of_the_wrong_shape(source: Path) -> None:
    change_config(source, intermediate_size=100)
    line = refused(recipe(RTN), source, CheckpointError)
    assert line == (
        "tensor model.layers.0.mlp.gate_proj.weight has shape [96, 64], config.json asks for"
        " [100, 64]; take weights and config of the same model"
    )


def test_too_much_that_nobody_recognises(source: Path) -> None:
    extra = {"model.layers.1.memory.weight": torch.zeros(64, 64, dtype=torch.bfloat16)}
    change(source, lambda tensors: tensors.update(extra))
    line = refused(recipe(RTN), source, CheckpointError)
    assert line.startswith("model.layers.1: 12 % of the block's parameters are not recognised")
    assert "memory.weight" in line
    assert "at most 5 %" in line


def test_weights_in_a_dtype_that_has_no_scales(source: Path) -> None:
    change(source, lambda tensors: tensors.update({DOWN: tensors[DOWN].double()}))
    assert refused(recipe(RTN), source, CheckpointError) == (
        f"tensor {DOWN} is stored as F64; BF16, F16, F32 can be quantized, so convert it or add"
        " the layer to ignore"
    )


@pytest.mark.parametrize("asked", ["rtn", "gptq"])
def test_no_space(source: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    stage, rest = (RTN, {}) if asked == "rtn" else (GPTQ, {"calibration": SELF})
    plan = make_plan(recipe(stage, **rest), source)
    passing = 2 * 4 * 16 * 64 * 4 if asked == "gptq" else 0
    needed = plan.shards.total_bytes + passing
    full = SimpleNamespace(f_bavail=needed - 1, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    less = "--set calibration.samples=3 would fit, or " if asked == "gptq" else ""
    assert refused(recipe(stage, **rest), source, OutputError, dtype="fp32") == (
        f"not enough disk space in {source.parent}: {needed:,} bytes are needed ({size(passing)} of"
        f" them only while it runs), {needed - 1:,} bytes are free; {less}make room or choose"
        " another disk"
    )


def test_evaluation_takes_disk_too(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known bytes are refused one too many, estimated ones from a tenth more than is free on."""
    own = {"kind": "self", "samples": 64, "length": 128}
    asked = recipe(RTN, evaluation={"texts": [own], "spill_bytes": 1 << 20})
    plan = make_plan(asked, source)
    known, states = plan.shards.total_bytes, 3 * 64 * 128 * 64 * 4
    assert output.evaluation_bytes(plan) == states

    def lines(free: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        monkeypatch.setattr(output, "free_bytes", lambda path: free)
        found = make_plan(asked, source, out=tmp_path / "out")
        return found.problems, tuple(x for x in found.warnings if "disk space" in x)

    assert lines(known + states) == ((), ())
    problems, (warning,) = lines(int((known + states) / 1.05))
    assert problems == ()
    assert warning.startswith(f"little disk space in {tmp_path}: {size(known + states)} are needed")
    (problem,), warnings = lines(int((known + states) / 1.11))
    assert "--set evaluation=null would fit, or make room" in problem
    assert warnings == ()


def test_an_output_that_is_not_empty(source: Path) -> None:
    out = source.parent / "full"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"no result of .* \(it holds 'mine.txt'\)"):
            run(recipe(RTN), source, out, options=RunOptions(overwrite=overwrite))
    assert [p.name for p in out.iterdir()] == ["mine.txt"]
    (out / "mine.txt").unlink()
    run(recipe(RTN), source, out)
    with pytest.raises(OutputError) as caught:
        run(recipe(RTN), source, out)
    assert str(caught.value) == f"{out} is not empty; choose another folder or add --overwrite"
    run(recipe(RTN), source, out, options=RunOptions(overwrite=True))


def test_an_output_inside_the_source(source: Path) -> None:
    with pytest.raises(OutputError, match="is inside the model's folder"):
        run(recipe(RTN), source, source / "out")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there(source: Path) -> None:
    assert refused(recipe(RTN), source, OutputError, device="cuda") == (
        "device is 'cuda' but torch sees no CUDA device; use --device cpu"
    )


def test_names_of_devices_and_dtypes(source: Path) -> None:
    assert refused(recipe(RTN), source, OutputError, device="tpu") == (
        "device is 'tpu'; it is 'auto', 'cpu', 'cuda' or 'cuda:N'"
    )
    assert refused(recipe(RTN), source, OutputError, dtype="int8") == (
        "dtype is 'int8'; it is one of bf16, fp16, fp32"
    )


def test_a_group_size_that_does_not_divide(source: Path, tmp_path: Path) -> None:
    path = recipe_file(tmp_path, {"method": "rtn", "scheme": "W4A16", "group_size": 48})
    assert refused(path, source, RecipeError) == (
        f"{path}:3: stages[0].group_size: model.layers.0.self_attn.q_proj has 64 input columns, not"
        " a multiple of 48 (nor have 11 more layers); use group_size 8, 16, 32 or granularity:"
        " channel without group_size"
    )
    shown = "--set 'stages[0].granularity=channel'"
    path = recipe_file(tmp_path, {"method": "rtn", "scheme": "W4A16"})
    line = refused(path, source, RecipeError)
    assert line.endswith(f"or {shown}")
    key = shown.split("'")[1]
    assert make_plan(path, source, overrides=[key]).problems == ()


def test_a_target_that_matches_nothing(source: Path, tmp_path: Path) -> None:
    path = recipe_file(tmp_path, {**RTN, "targets": ["down_prj"]})
    line = refused(path, source, RecipeError)
    assert line.startswith(f"{path}:7: stages[0].targets[0]: 'down_prj' matches no layer;")
    assert "down_proj" in line


def test_the_same_layer_twice(source: Path) -> None:
    line = refused(recipe(RTN, {**RTN, "targets": ["down_proj"]}), source, RecipeError)
    assert "model.layers.0.mlp.down_proj already belongs to stages[0]" in line


def test_calibration_texts_are_looked_for_first(source: Path) -> None:
    data = {"sources": [{"text": "/nowhere/words.txt"}], "samples": 4, "length": 16}
    line = refused(recipe(GPTQ, calibration=data), source, DataError)
    assert line.startswith(
        "recipe:5: calibration.sources[0]: /nowhere/words.txt: there is no such file"
    )
    text = {"text": "/nowhere/held-out.txt", "name": "held-out"}
    line = refused(recipe(RTN, evaluation={"texts": [text]}), source, DataError)
    assert line.startswith(
        "recipe:3: evaluation.texts[0]: /nowhere/held-out.txt: there is no such file"
    )


def test_rows_longer_than_the_model(source: Path, tmp_path: Path) -> None:
    asked = recipe(GPTQ, calibration={**SELF, "length": 129})
    assert refused(asked, source, RecipeError) == (
        "recipe:2: calibration.length: is 129, the model's context is 128 tokens; give 128 or less"
    )
    texts = {"texts": [{"kind": "self", "name": "own", "length": 200}]}
    line = refused(recipe(RTN, evaluation=texts), source, RecipeError)
    assert "evaluation.texts[0].length: is 200, the model's context is 128 tokens" in line
    line = refused(recipe(RTN, evaluation={"texts": ["self"], "window": 500}), source, RecipeError)
    assert "evaluation.window: is 500, but the model's context is 128" in line


def test_a_missing_tokenizer(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").unlink()
    (source / "tokenizer_config.json").unlink()
    line = refused(recipe(GPTQ, calibration=text_source(tmp_path)), source, DataError)
    assert "tokenizer" in line


def test_a_decoder_that_transformers_cannot_run(source: Path) -> None:
    """Nothing could be said about its result, not even about a rounded one."""
    change_config(source, model_type="nobody_knows")
    for asked in (recipe(RTN), recipe(GPTQ, calibration=SELF)):
        assert refused(asked, source, CheckpointError) == (
            "model_type 'nobody_knows' is unknown to this transformers; it is in no architecture"
            " table, so nothing could be said about a result of it"
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [DOWN, "model.layers.1.input_layernorm.weight", "lm_head.weight"])
@pytest.mark.parametrize("asked", ["rtn", "gptq"])
def test_damaged_values_stop_the_run(
    source: Path, tmp_path: Path, value: float, name: str, asked: str
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[70 if tensors[name].numel() > 70 else 3] = value

    change(source, spoil)
    stage, rest = (RTN, {})
    if asked == "gptq":
        stage, rest = (GPTQ, {"calibration": text_source(tmp_path)})
    out = tmp_path / "out"
    with pytest.raises(CheckpointError) as caught:
        run(recipe(stage, **rest), source, out)
    number = "1 NaN and 0" if value != value else "0 NaN and 1"
    assert str(caught.value).startswith(f"tensor '{name}'")
    assert f"has {number} infinite values, the first at [" in str(caught.value)
    assert "repair the checkpoint or download it again" in str(caught.value)
    assert not out.exists()
    if asked == "rtn" and name == "lm_head.weight":  # it comes first: nothing to go on with
        assert not (tmp_path / "out.partial").exists()
        return
    assert ("block 0" in units(tmp_path / "out.partial")) == (name != "lm_head.weight")
    # Resuming meets the same tensor: nothing was recorded that should not be.
    with pytest.raises(CheckpointError, match="infinite values"):
        run(recipe(stage, **rest), source, out, options=RunOptions(resume=True))


def test_too_little_calibration_text_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    """It is counted when work has begun; the corrected command must not meet what that left."""
    few = text_source(tmp_path)
    many = recipe(GPTQ, calibration={**few, "samples": 4000})
    assert "tokens" in refused(many, source, DataError)
    run(recipe(GPTQ, calibration=few), source, tmp_path / "out")


def units(partial: Path) -> set[str]:
    """What the journal says is finished of the one pass of the run."""
    (held,) = json.loads((partial / "journal.json").read_text())["passes"].values()
    return set(held["units"])


def interrupt(*arguments: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_beginning_leaves_nothing_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.passes.calibration_tokens.prepare", interrupt)
    asked = recipe(GPTQ, calibration=text_source(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        run(asked, source, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()
    monkeypatch.undo()
    monkeypatch.setattr("compress.passes.quantize.calibrated._embed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(asked, source, tmp_path / "out")
    assert units(tmp_path / "out.partial") == {"start", "calibration", "outside"}
    monkeypatch.undo()
    run(asked, source, tmp_path / "out", options=RunOptions(resume=True))


def test_what_another_run_made_stays(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.passes.calibration_tokens.prepare", interrupt)
    asked, part = recipe(GPTQ, calibration=text_source(tmp_path)), tmp_path / "out.partial"
    part.mkdir()
    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt):
            run(asked, source, tmp_path / "out", options=RunOptions(resume=resume))
        assert units(part) == {"start"}
    monkeypatch.undo()
    run(asked, source, tmp_path / "out", options=RunOptions(resume=True))
