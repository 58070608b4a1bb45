"""Runs that write the other formats: scales are chosen in their dtype, misfits are in the plan."""

from pathlib import Path

import pytest
import torch
import yaml

from compress.checkpoint import Checkpoint
from compress.errors import RecipeError
from compress.formats import Weights, open_weights
from compress.plan.output_format import scale_dtype
from compress.verbs import export, make_plan, run
from helpers import tiny_models

TEXT = "once upon a time there was a small dog who liked to play in the park. "
W4 = {"scheme": "W4A16", "group_size": 32}
ASYM = {"scheme": "W4A16_ASYM", "group_size": 32}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("formats"), tied=True)


def recipe(folder: Path, fmt: str, *stages: dict[str, object], calibrated: bool = False) -> Path:
    found: dict[str, object] = {"name": "x", "stages": stages, "output": {"format": fmt}}
    if calibrated:
        (folder / "text.txt").write_text(TEXT * 100)
        found["calibration"] = {
            "sources": [{"text": str(folder / "text.txt")}],
            "samples": 8,
            "length": 32,
        }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(found))
    return path


def opened(folder: Path) -> Weights:
    weights = open_weights(Checkpoint.open(folder))
    assert weights.format.coded
    return weights


@pytest.mark.parametrize(
    ("method", "options", "fmt", "dtype"),
    [
        ("rtn", W4, "gptq", torch.float16),
        ("rtn", ASYM, "awq", torch.float16),
        ("gptq", ASYM, "gptq_v2", torch.float16),
        ("gptq", {**W4, "act_order": "group"}, "gptq", torch.float16),
        ("fp8", {"scheme": "FP8_DYNAMIC"}, "modelopt", torch.float32),
    ],
)
def test_a_run_writes_the_format(
    source: Path, tmp_path: Path, method: str, options: dict[str, object], fmt: str, dtype: object
) -> None:
    stage = {"method": method, **options}
    report = run(
        recipe(tmp_path, fmt, stage, calibrated=method == "gptq"), source, tmp_path / "out"
    )
    assert report.result.format == fmt
    weights = opened(tmp_path / "out")
    name = weights.spec.blocks[0].linears[0].tensor
    found = weights.quantized(name)
    assert found is not None
    assert found.scale.dtype == dtype
    original = Checkpoint.open(source).read(name).float()
    assert (found.dequantize() - original).norm() < 0.2 * original.norm()
    # Nothing is inexact on the way to where all of it fits.
    export(tmp_path / "out", "compressed-tensors", tmp_path / "ct")
    again = opened(tmp_path / "ct").quantized(name)
    assert again is not None
    assert torch.equal(again.dequantize(), found.dequantize())
    assert (tmp_path / "out" / "quantize_config.json").exists() == fmt.startswith("gptq")


def test_what_does_not_fit_is_refused_in_the_plan(source: Path, tmp_path: Path) -> None:
    def refused(fmt: str, *stages: dict[str, object]) -> str:
        with pytest.raises(RecipeError) as caught:
            run(recipe(tmp_path, fmt, *stages), source, tmp_path / "out")
        assert not list(tmp_path.glob("out*"))
        return str(caught.value).partition("recipe.yaml")[2]

    rtn = {"method": "rtn", **W4}
    assert "output.format: is fp8: it holds 8-bit floats only, not int4" in refused("fp8", rtn)
    assert "output.format: is awq: it holds 4 bits, not 8" in refused(
        "awq", {"method": "rtn", "scheme": "W8A16"}
    )
    two = [
        {**rtn, "targets": ["*.self_attn.*"]},
        {**rtn, "group_size": 16, "targets": ["*.mlp.*"]},
    ]
    with pytest.raises(RecipeError, match="'awq' has one group size for all layers"):
        run(recipe(tmp_path, "awq", *two), source, tmp_path / "out")


def test_dtypes_of_scales() -> None:
    assert scale_dtype("gptq", torch.bfloat16) == torch.float16
    for fmt in ("compressed-tensors", "fp8", "bitsandbytes", "dense"):
        assert scale_dtype(fmt, torch.bfloat16) == torch.bfloat16


def test_the_plan_warns_of_zero_points_that_gptq_1_cannot_store(
    source: Path, tmp_path: Path
) -> None:
    def warned(fmt: str, options: dict[str, object]) -> bool:
        plan = make_plan(recipe(tmp_path, fmt, {"method": "rtn", **options}), source)
        return any("zero point of 0" in line for line in plan.warnings)

    assert warned("gptq", ASYM)
    assert not warned("gptq", W4)
    assert not warned("gptq_v2", ASYM)


@pytest.mark.parametrize("fmt", ["gptq", "gptq_v2", "awq", "modelopt", "fp8", "bitsandbytes"])
def test_quantized_embeddings_go_into_compressed_tensors_only(
    source: Path, tmp_path: Path, fmt: str
) -> None:
    both = {"method": "rtn", **W4, "targets": ["lm_head", "embedding"], "ignore": []}
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe(tmp_path, fmt, {"method": "rtn", **W4}, both), source)
    assert "\n" not in str(caught.value)
    plan = make_plan(recipe(tmp_path, "compressed-tensors", both), source)
    assert {m.linear.role for m in plan.modules} == {"head", "embedding"}


def test_embeddings_are_exported(source: Path, tmp_path: Path) -> None:
    """Back to dense; formats without a place for them say so and leave nothing."""
    both = {"method": "rtn", **W4, "targets": ["*", "lm_head", "embedding"], "ignore": []}
    run(recipe(tmp_path, "compressed-tensors", both), source, tmp_path / "packed")
    export(tmp_path / "packed", "dense", tmp_path / "dense")
    packed, dense = opened(tmp_path / "packed"), open_weights(Checkpoint.open(tmp_path / "dense"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(dense.read(name), packed.read(name)), name
    with pytest.raises(RecipeError, match="embed"):
        export(tmp_path / "packed", "gptq", tmp_path / "gptq")
    assert not list(tmp_path.glob("gptq*"))
