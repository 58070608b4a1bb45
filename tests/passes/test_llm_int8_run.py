"""LLM.int8() through a whole run: what is written, reported, resumed and refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compress.checkpoint import Checkpoint
from compress.checkpoint.shards import writer
from compress.errors import CompressError, OutputError
from compress.formats import Weights, open_weights
from compress.formats.bitsandbytes.codec import SIDE_FILE
from compress.report.codec import read_json
from compress.runs import output
from compress.verbs import RunOptions, inspect_checkpoint, inspect_table, make_plan, run
from conftest import tree_hashes
from helpers import faults
from helpers.short_runs import recipe, text_source

DYNAMIC = {"method": "llm_int8", "scheme": "LLM_INT8"}
CALIBRATED = {"method": "llm_int8", "scheme": "LLM_INT8_CALIBRATED"}
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}


def fixed(threshold: float) -> dict[str, Any]:
    activation = {"outliers": "calibrated", "threshold": threshold}
    scheme = {"bits": 8, "granularity": "channel", "activation": activation}
    return {"method": "llm_int8", "scheme": scheme}


def opened(out: Path) -> Weights:
    weights = open_weights(Checkpoint.open(out))
    assert weights.format.coded
    return weights


def refusal(*stages: Any, source: Path, **rest: Any) -> str:
    with pytest.raises(CompressError) as caught:
        make_plan(recipe(*stages, **rest), source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_calibrated_columns_keep_the_sources_weights(tiny, tmp_path: Path, family: str) -> None:
    source, out = tiny(family), tmp_path / "out"
    report = run(recipe(fixed(2.0), calibration=text_source(tmp_path)), source, out)
    weights, original = opened(out), Checkpoint.open(source)
    counts = {}
    for linear in weights.spec.linears():
        columns = weights.outliers(linear.tensor)
        assert columns is not None, linear.name
        stored = original.read(linear.tensor)
        stored = stored.t() if linear.transposed else stored
        assert torch.equal(columns.weight, stored[:, columns.columns]), linear.name
        counts[linear.name] = columns.columns.numel()
    assert 0 < sum(counts.values()) < sum(x.shape[1] for x in weights.spec.linears())
    layers = [x for x in report.layers if x.skipped_reason is None]
    assert {x.name: x.outlier_columns for x in layers} == counts
    for layer, linear in zip(layers, weights.spec.linears(), strict=True):
        (n, k), some = linear.shape, counts[layer.name]
        assert layer.bytes_after == n * k + 4 * n + 1 + some * (2 * n + 8)
        assert layer.bits_per_weight == pytest.approx(8 * layer.bytes_after / (n * k))
    side = (out / SIDE_FILE).stat().st_size
    assert report.result.bytes == side + (out / "model.safetensors").stat().st_size
    assert [p.bytes_after for p in report.result.sizes if p.name == "outlier columns"] == [side]
    assert not any(p.name in ("outliers", "journal.json") for p in out.iterdir())


def test_it_is_shown(tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(recipe(fixed(2.0), calibration=text_source(tmp_path)), tiny("llama"), out)
    facts = inspect_checkpoint(out, verify=True)
    counts = facts["outlier_columns"]
    assert facts["damaged"] == {}
    assert facts["files"] == ["model.safetensors", SIDE_FILE]
    assert facts["bytes"] == sum((out / name).stat().st_size for name in facts["files"])
    assert len(counts) == 14
    q = counts["model.layers.0.self_attn.q_proj"]
    shown = inspect_table(facts)
    assert f"model.layers.0.self_attn: {q} in q_proj k_proj v_proj" in shown
    assert "14 x int8 sym channel a8 calibrated outliers>=2" in shown
    page = (out / "report" / "report.html").read_text()
    assert "Outliers" in page
    assert read_json(out / "report" / "report.json").layers[0].outlier_columns == q


def test_the_dynamic_form_looks_for_no_columns(tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = run(recipe(DYNAMIC), tiny("llama"), out)
    assert not (out / "compress_model").exists()
    assert {x.outlier_columns for x in report.layers} == {None}
    assert "Outliers" not in (out / "report" / "report.html").read_text()
    assert "outlier_columns" not in inspect_checkpoint(out)


def test_the_side_file_aside_both_forms_are_one_checkpoint(tiny, tmp_path: Path) -> None:
    source = tiny("llama")
    asked = recipe(CALIBRATED, calibration=text_source(tmp_path))
    run(asked, source, tmp_path / "fixed")
    run(recipe(DYNAMIC), source, tmp_path / "found")
    for name in ("model.safetensors", "config.json"):
        one, two = (tmp_path / x / name for x in ("fixed", "found"))
        assert one.read_bytes() == two.read_bytes()


def test_no_outlier_at_all_is_a_file_of_empty_columns(tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(recipe(fixed(1e6), calibration=text_source(tmp_path)), tiny("llama"), out)
    found = load_file(out / SIDE_FILE)
    assert len(found) == 28
    assert all(x.numel() == 0 for x in found.values())
    assert set(inspect_checkpoint(out)["outlier_columns"].values()) == {0}


def test_fp32_sources_keep_fp32_columns(tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(recipe(fixed(2.0), calibration=text_source(tmp_path)), tiny("llama", dtype="fp32"), out)
    kinds = {x.dtype for name, x in load_file(out / SIDE_FILE).items() if "weight" in name}
    assert kinds == {torch.float32}


def test_stopped_after_any_unit_and_resumed(tiny, tmp_path: Path) -> None:
    source = tiny("phi3", num_key_value_heads=1, **SMALL)
    asked = recipe(fixed(1.0), calibration=text_source(tmp_path, samples=2, length=8))
    run(asked, source, tmp_path / "whole")
    whole = {k: v for k, v in tree_hashes(tmp_path / "whole").items() if "report/" not in k}
    assert SIDE_FILE in whole

    class Stopped(Exception):
        pass

    for unit in ("tensors outside the blocks", "block 0", "block 1"):
        out = tmp_path / unit.replace(" ", "")

        def stop(event: Any, unit: str = unit) -> None:
            if event.unit == unit:
                raise Stopped

        with pytest.raises(Stopped):
            run(asked, source, out, progress=stop)
        run(asked, source, out, options=RunOptions(resume=True))
        assert {k: v for k, v in tree_hashes(out).items() if "report/" not in k} == whole


@pytest.mark.parametrize("step", [90, pytest.param(18, marks=pytest.mark.long)])
def test_killed_while_columns_are_put_aside_and_joined(tiny, tmp_path: Path, step: int) -> None:
    """Every `step`th operation, and each of those of the folder that the side file lies in."""
    source = tiny("phi3", num_key_value_heads=1, **SMALL)
    asked = recipe(fixed(1.0), calibration=text_source(tmp_path, samples=2, length=8))
    with faults.counting() as calls:
        run(asked, source, tmp_path / "whole")
    whole = {k: v for k, v in tree_hashes(tmp_path / "whole").items() if "report/" not in k}
    folders = [i for i, name in enumerate(calls.names) if name == "mkdir"]
    joining = range(folders[-2], folders[-2] + 10)  # the last folder made is the report's
    for number in sorted({*range(5, len(calls), step), *joining}):
        out = tmp_path / str(number)
        with pytest.raises(faults.Killed), faults.fault_at(number, "torn"):
            run(asked, source, out)
        left = any(any(p.iterdir()) for p in tmp_path.glob(f"{number}.*"))
        if left or not out.exists():
            run(asked, source, out, options=RunOptions(resume=left))
        found = {k: v for k, v in tree_hashes(out).items() if "report/" not in k}
        assert found == whole, (number, calls.names[number])


def test_no_room_to_join_is_one_line_and_resumable(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tiny("llama"), tmp_path / "out"
    asked = recipe(fixed(2.0), calibration=text_source(tmp_path))
    with monkeypatch.context() as full:
        full.setattr(
            writer, "free_bytes", lambda path: 0 if path.name == "compress_model" else 1 << 40
        )
        with pytest.raises(OutputError, match=r"^not enough disk space in .*compress_model: "):
            run(asked, source, out)
    with monkeypatch.context() as full:
        full.setattr(output, "free_bytes", lambda path: 0)
        with pytest.raises(OutputError, match=r"^not enough disk space in ") as caught:
            run(asked, source, out, options=RunOptions(resume=True))
    pieces = list((tmp_path / "out.partial" / "outliers").iterdir())
    allocated = sum(p.stat().st_blocks * 512 for p in pieces)
    number, unit = str(caught.value).split(": ")[1].split()[:2]
    needed = float(number) * {"kB": 1e3, "MB": 1e6}[unit]
    assert len(pieces) == 14
    assert abs(needed - allocated) < 1 << 16
    run(asked, source, out, options=RunOptions(resume=True))
    assert len(opened(out).checkpoints) == 2


@pytest.mark.parametrize("damage", ["gone", "torn", "another"])
def test_columns_that_were_put_aside_and_changed(tiny, tmp_path: Path, damage: str) -> None:
    source, out = tiny("llama"), tmp_path / "out"
    asked = recipe(fixed(2.0), calibration=text_source(tmp_path))

    def stop(event: Any) -> None:
        if event.unit == "block 0":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(asked, source, out, progress=stop)
    pieces = sorted((tmp_path / "out.partial" / "outliers").iterdir())
    assert len(pieces) == 7
    if damage == "gone":
        pieces[0].unlink()
    elif damage == "torn":
        pieces[0].write_bytes(pieces[0].read_bytes()[:-3])
    else:
        pieces[0].write_bytes(pieces[1].read_bytes())
    with pytest.raises(OutputError, match=r"remove .*out.partial and start again") as caught:
        run(asked, source, out, options=RunOptions(resume=True))
    assert "\n" not in str(caught.value)


def test_formats_that_do_not_fit(tiny) -> None:
    source = tiny("llama")
    w4 = {"method": "rtn", "scheme": "W4A16", "group_size": 32}
    found = refusal(DYNAMIC, source=source, output={"format": "compressed-tensors"})
    assert found.endswith(
        "output.format: compressed-tensors has no outlier columns, which int8 sym channel a8"
        " dynamic outliers keeps; use bitsandbytes, auto or dense"
    )
    found = refusal(w4, source=source, output={"format": "bitsandbytes"})
    assert "it holds LLM.int8() only (method llm_int8), not int4 sym g32; use auto or" in found
    q = {**DYNAMIC, "targets": ["self_attn.*"]}
    for asked in ("auto", "bitsandbytes"):
        found = refusal(q, {**w4, "targets": ["mlp.*"]}, source=source, output={"format": asked})
        assert "it holds LLM.int8() only" in found
        assert "use dense, or a run for each of the two" in found
    several = {**fixed(8.0), "targets": ["mlp.*"]}
    data = {"sources": "self", "samples": 4, "length": 16}
    found = refusal(q, several, source=source, calibration=data)
    assert "one threshold for all layers, the stages have 6 and 8" in found
    assert make_plan(recipe(DYNAMIC), source).format == "bitsandbytes"
    assert make_plan(recipe(w4), source).format == "compressed-tensors"


def test_merged_layers_with_two_thresholds(tiny) -> None:
    inputs = {"outliers": "dynamic", "threshold": 6.0000001}
    scheme = {"bits": 8, "granularity": "channel", "activation": inputs}
    other = {"method": "llm_int8", "scheme": scheme, "targets": ["*.q_proj"]}
    rest = {**DYNAMIC, "ignore": ["lm_head", "*.q_proj"]}
    found = refusal(rest, other, source=tiny("llama"), output={"format": "dense"})
    assert "q_proj would be int8 sym channel a8 dynamic outliers>=6.0000001 and" in found
    assert found.endswith("into one matrix, so name all of them here or none")


def test_the_plan_says_that_columns_come_on_top(tiny) -> None:
    asked = recipe(CALIBRATED, calibration={"sources": "self", "samples": 4, "length": 16})
    plan = make_plan(asked, tiny("llama"))
    assert any(x.startswith("compress_model/outliers.safetensors comes on") for x in plan.warnings)
    assert not make_plan(recipe(DYNAMIC), tiny("llama")).warnings
    assert plan.tensor_parallel[2] == (
        "vLLM splits no bitsandbytes checkpoint that is quantized already",
    )


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_mixtures(tiny, tmp_path: Path, family: str) -> None:
    source, data = tiny(family), text_source(tmp_path)
    found = refusal(CALIBRATED, source=source, calibration=data)
    assert (
        " is an expert, and bitsandbytes quantizes none in transformers; add '*.experts.*'" in found
    )
    assert "stages[0].targets: model.layers.0." in found
    assert "add '*.experts.*' to ignore, or use output.format dense" in found

    stage = {**fixed(2.0), "ignore": ["lm_head", "router", "*.experts.*"]}
    report = run(recipe(stage, calibration=data), source, tmp_path / "attention")
    quantized = [x for x in report.layers if x.skipped_reason is None]
    assert len(quantized) == 8
    assert all(x.outlier_columns is not None for x in quantized)

    asked = recipe(fixed(2.0), calibration=data, output={"format": "dense"})
    report = run(asked, source, tmp_path / "dense")
    experts = [x for x in report.layers if x.expert is not None]
    assert len(experts) == 24
    for layer in experts:
        assert layer.outlier_columns is not None
        assert layer.tokens or layer.kept_reason, layer.name
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert "quantization_config" not in config
