"""Every family through a run and opened again: what was stored is what was reported."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.blocks.skeleton import Skeleton
from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.methods.outcome import relative_error
from compress.report.schema import Layer, Report
from compress.verbs import run
from helpers.short_runs import GPTQ, RTN, SELF, recipe
from helpers.tiny_models import LANDINGS, TABLED, UNLISTED

EXPERTS = {"mixtral": 3 * 4, "qwen3_moe": 3 * 4}  # expert linears a block


def layers(report: Report) -> dict[str, Layer]:
    return {layer.name: layer for layer in report.stages[0].layers}


def check_result(source: Path, out: Path, report: Report) -> None:
    """The whole key set, every untouched byte, and every reported number of every layer."""
    before, after = Checkpoint.open(source), Checkpoint.open(out)
    original, result = open_weights(before), open_weights(after)
    assert result.shapes == dict(before.shapes)
    assert set(result.spec.all_linears()) == set(original.spec.all_linears())
    assert result.spec.copied == original.spec.copied
    reported = layers(report)
    assert set(reported) == {x.name for x in original.spec.all_linears()}
    quantized = set()
    for linear in original.spec.all_linears():
        layer = reported[linear.name]
        q = result.quantized(linear.tensor)
        if layer.skipped_reason is not None:
            assert q is None
            assert layer.method == "none"
            continue
        assert q is not None
        quantized.add(linear.tensor)
        assert q.shape == linear.shape
        assert q.scheme.describe() == layer.scheme
        stored = [after.tensors[n] for n in after.tensors if n.startswith(linear.name + ".weight")]
        assert layer.bytes_after == sum(info.nbytes for info in stored)
        assert layer.bytes_before == before.tensors[linear.tensor].nbytes
        if layer.tokens is None:
            weight = original.read(linear.tensor).float()
            weight = weight.t() if linear.transposed else weight
            assert layer.error == pytest.approx(
                relative_error(weight, q.dequantize(), None), rel=1e-5
            )
        assert layer.error is not None
        assert 0 < layer.error < 0.05
    for name in before.tensors:
        if name not in quantized:
            assert torch.equal(bits_of(before, name), bits_of(after, name))
    assert report.result.bytes == sum((out / f).stat().st_size for f in after.files)
    assert report.plan_vs_actual is not None
    assert report.plan_vs_actual.bytes.planned == report.result.bytes


def bits_of(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return checkpoint.read(name).reshape(-1).view(torch.uint8)


def finite_logits(out: Path) -> None:
    weights = open_weights(Checkpoint.open(out))
    skeleton = Skeleton(weights.checkpoint.config, weights.spec, dtype=torch.float32)
    ids = torch.arange(12).view(1, 12)
    context, hidden = skeleton.context(ids), skeleton.embed(weights, ids)
    for index in range(len(weights.spec.blocks)):
        block = skeleton.load_block(weights, index)
        hidden = skeleton.run_block(block, index, hidden, context)
    assert torch.isfinite(skeleton.logits(weights, skeleton.final_hidden(weights, hidden)[0])).all()


# Each that differs in what is read, merged, turned or scaled: the rest are put together of these.
APART = ("llama", "phi3", "gpt2", "gemma2", "opt", "qwen3_moe", "deepseek_v3")
BY_METHOD = [
    pytest.param("rtn", family, id=f"rtn-{family}",
                 marks=() if family in TABLED else pytest.mark.long)
    for family in (*TABLED, *LANDINGS)
] + [
    pytest.param("gptq", family, id=f"gptq-{family}",
                 marks=() if family in APART else pytest.mark.long)
    for family in (*TABLED, *LANDINGS)
]  # fmt: skip


@pytest.mark.parametrize(("method", "family"), BY_METHOD)
def test_every_family(tiny, tmp_path: Path, family: str, method: str) -> None:
    source, out = tiny(family), tmp_path / "out"
    with_data = {"calibration": {**SELF, "samples": 16}} if method == "gptq" else {}
    report = run(recipe(GPTQ if method == "gptq" else RTN, **with_data), source, out)
    check_result(source, out, report)
    finite_logits(out)
    found = layers(report).values()
    experts = [x for x in found if x.expert is not None]
    assert len(experts) == 2 * EXPERTS.get(family, 0)
    if method == "gptq":
        solved = [x for x in found if x.skipped_reason is None]
        assert all(x.tokens == 16 * 16 for x in solved), "every token goes to every expert"
        assert {x.method for x in solved} <= {"gptq", "rtn"}
        assert all(x.kept_reason for x in solved if x.method == "rtn")
        assert sum(x.method == "gptq" for x in solved) > len(solved) / 2
        assert report.calibration is not None
        assert report.calibration["tokens"] == 256


@pytest.mark.parametrize("family", UNLISTED)
def test_other_decoders_weight_only(tiny, tmp_path: Path, family: str) -> None:
    source, out = tiny(family), tmp_path / "out"
    report = run(recipe(RTN), source, out)
    check_result(source, out, report)
    assert any("is in no architecture table" in line for line in report.warnings)


@pytest.mark.parametrize(
    "family", [UNLISTED[0], *(pytest.param(x, marks=pytest.mark.long) for x in UNLISTED[1:])]
)
def test_other_decoders_calibrated(tiny, tmp_path: Path, family: str) -> None:
    source, out = tiny(family), tmp_path / "out"
    report = run(recipe(GPTQ, calibration=SELF), source, out)
    check_result(source, out, report)
    by_name = layers(report)
    assert all(x.tokens == 64 for x in by_name.values() if x.skipped_reason is None)


# Each value of each by default; all together in the long set.
DEFAULT = {
    ("bf16", True, False),
    ("fp16", False, True),
    ("fp32", True, True),
    ("fp32", False, False),
}
SOURCES = [
    pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.long)
    for case in product(("bf16", "fp16", "fp32"), (True, False), (True, False))
]


@pytest.mark.parametrize(("dtype", "tied", "bias"), SOURCES)
def test_dtypes_ties_and_biases(tiny, tmp_path: Path, dtype: str, tied: bool, bias: bool) -> None:
    source, out = tiny("llama", dtype=dtype, tied=tied, bias=bias), tmp_path / "out"
    report = run(recipe(RTN), source, out)
    check_result(source, out, report)
    checkpoint = Checkpoint.open(out)
    assert ("lm_head.weight" in checkpoint.tensors) == (not tied)
    assert ("model.layers.0.mlp.up_proj.bias" in checkpoint.tensors) == bias
    code = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}[dtype]
    assert checkpoint.tensors["model.layers.0.mlp.up_proj.weight_scale"].dtype == code


@pytest.mark.parametrize(("family", "dtype"), [("qwen2", "fp16"), ("gpt2", "fp32")])
def test_calibrated_in_other_dtypes(tiny, tmp_path: Path, family: str, dtype: str) -> None:
    source, out = tiny(family, dtype=dtype, tied=True), tmp_path / "out"
    check_result(source, out, run(recipe(GPTQ, calibration=SELF), source, out))


def test_shards_in_and_out(tiny, tmp_path: Path) -> None:
    source, out = tiny("llama", max_shard_size="100KB"), tmp_path / "out"
    assert len(Checkpoint.open(source).files) > 1
    report = run(recipe(RTN, output={"shard_size": "30KB"}), source, out)
    check_result(source, out, report)
    assert len(Checkpoint.open(out).files) > 2
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(Checkpoint.open(out).tensors)


def test_everything_beside_the_weights_goes_along(tiny, tmp_path: Path) -> None:
    import shutil

    source = tmp_path / "source"
    shutil.copytree(tiny("qwen2"), source)
    (source / "LICENSE").write_text("theirs")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "README.md").write_text("the source's own card")
    (source / "onnx").mkdir()
    (source / "onnx" / "model.onnx").write_text("x")
    out = tmp_path / "out"
    report = run(recipe(RTN), source, out)
    for name in ("LICENSE", "chat_template.jinja", "tokenizer.json", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
        assert name in report.copied_files
    assert "onnx/" in report.skipped_files
    assert "theirs" not in (out / "README.md").read_text()
    assert "made by compress-model" in (out / "README.md").read_text().lower()
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, out))
    assert after.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert after == before


def test_the_recipe_in_the_result_makes_the_same_result(tiny, tmp_path: Path) -> None:
    from conftest import tree_hashes

    source = tiny("llama")
    run(recipe(RTN), source, tmp_path / "a")
    run(tmp_path / "a" / "recipe.yaml", source, tmp_path / "b")
    hashes: list[dict[str, Any]] = []
    for name in ("a", "b"):
        found = tree_hashes(tmp_path / name)
        hashes.append({k: v for k, v in found.items() if not k.startswith("report/")})
    assert hashes[0] == hashes[1]
