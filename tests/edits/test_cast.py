"""cast: one dtype for all floats; widening is exact, and what narrowing would lose is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from compress.checkpoint import TensorInfo
from compress.edits.cast import NAMES, CastConfig, _with_dtype, apply
from compress.edits.edit import Part
from compress.errors import CheckpointError
from compress.report.html import render_html
from compress.report.terminal.table import render_table
from compress.verbs import make_plan, run
from helpers.in_transformers import logits
from helpers.short_runs import recipe, text_source

WIDE = {"method": "cast", "dtype": "fp32"}
AT = "recipe:3: stages[0]: "
WEIGHT = "model.layers.1.mlp.up_proj.weight"


def cast(dtype: str) -> dict[str, str]:
    return {"method": "cast", "dtype": dtype}


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("stored", ["fp32", "bf16"])
def test_every_tensor_is_torchs_own_cast(tiny, tmp_path: Path, stored: str, dtype: str) -> None:
    source = tiny("llama", dtype=stored)
    report = run(recipe(cast(dtype)), source, tmp_path / "out")
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys()
    for name, weight in before.items():
        assert torch.equal(after[name], weight.to(NAMES[dtype]))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config.get("dtype") or config.get("torch_dtype")) == str(NAMES[dtype])[len("torch.") :]
    assert report.result.bits_per_weight == 8 * NAMES[dtype].itemsize
    assert report.result.format == "dense"


def test_widening_costs_nothing(tiny, tmp_path: Path) -> None:
    """Identity in fp32: transformers computes the very numbers it did."""
    source = tiny("llama", dtype="bf16")
    texts = text_source(tmp_path)["sources"]
    report = run(recipe(WIDE, evaluation={"texts": texts}), source, tmp_path / "out")
    assert report.quality is not None
    assert report.quality.texts[0].kl == 0
    models = [AutoModelForCausalLM.from_pretrained(x) for x in (source, tmp_path / "out")]
    assert [m.dtype for m in models] == [torch.bfloat16, torch.float32]
    assert torch.equal(*(logits(m.float()) for m in models))


def test_a_nested_config_names_the_dtype_too(tiny, tmp_path: Path) -> None:
    source = tiny("gemma3_text")
    before = json.loads((source / "config.json").read_text())
    (tmp_path / "copy").mkdir()
    for path in source.iterdir():
        (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    outer = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": before}
    (tmp_path / "copy" / "config.json").write_text(json.dumps(outer))
    plan = make_plan(recipe(WIDE), tmp_path / "copy")
    assert plan.result.config["torch_dtype"] == "float32"
    assert {v for k, v in plan.result.config["text_config"].items() if "dtype" in k} == {"float32"}


def damaged(tiny, folder: Path, weight: torch.Tensor, name: str = WEIGHT) -> Path:
    """A copy of a tiny model in fp32 with another weight."""
    source, copy = tiny("llama", dtype="fp32"), folder / "copy"
    copy.mkdir()
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    tensors = load_file(copy / "model.safetensors")
    assert tensors[name].shape == weight.shape
    save_file({**tensors, name: weight}, copy / "model.safetensors", {"format": "pt"})
    return copy


def refusal(source: Path, folder: Path, dtype: str = "fp16") -> str:
    with pytest.raises(CheckpointError) as caught:
        run(recipe(cast(dtype)), source, folder / "out")
    assert not (folder / "out").exists()
    return str(caught.value)


def test_a_value_that_would_be_infinite_is_refused_by_name(tiny, tmp_path: Path) -> None:
    weight = torch.ones(96, 64)
    weight[5, 7] = 65519.0  # rounds to 65504, the largest of fp16
    run(recipe(cast("fp16")), damaged(tiny, tmp_path, weight), tmp_path / "fits")
    weight[5, 8] = -65520.0
    (tmp_path / "second").mkdir()
    source = damaged(tiny, tmp_path / "second", weight)
    assert refusal(source, tmp_path) == (
        f"{AT}tensor '{WEIGHT}' has 1 value beyond 65504, the largest of float16 (one is"
        " -65520); cast to bf16 or fp32"
    )
    run(recipe(cast("bf16")), source, tmp_path / "bf16")


def test_the_remedy_is_a_dtype_that_holds_the_value(tiny, tmp_path: Path) -> None:
    weight = torch.ones(96, 64)
    weight[5, 7] = 3.4e38
    assert refusal(damaged(tiny, tmp_path, weight), tmp_path, "bf16") == (
        f"{AT}tensor '{WEIGHT}' has 1 value beyond 3.38953e+38, the largest of bfloat16 (one is"
        " 3.4e+38); cast to fp32"
    )


def test_a_row_that_would_become_0_is_refused_by_name(tiny, tmp_path: Path) -> None:
    weight = torch.ones(96, 64)
    weight[3], weight[4] = 0.0, 2e-8  # a row of zeros is nobody's loss
    assert refusal(damaged(tiny, tmp_path, weight), tmp_path) == (
        f"{AT}row 4 of tensor '{WEIGHT}' would become 0 in float16: its values are below"
        " 3e-08; cast to bf16 or fp32"
    )


def test_zeros_in_a_vector_are_no_loss_and_a_lost_vector_is(tiny, tmp_path: Path) -> None:
    name, norm = "model.norm.weight", torch.ones(64)
    norm[:8] = 1e-9
    run(recipe(cast("fp16")), damaged(tiny, tmp_path, norm, name), tmp_path / "some")
    (tmp_path / "second").mkdir()
    source = damaged(tiny, tmp_path / "second", torch.full((64,), 1e-9), name)
    assert refusal(source, tmp_path).startswith(f"{AT}tensor '{name}' would become 0 in ")


def test_numbers_that_are_no_floats_stay_and_are_named(tiny, tmp_path: Path) -> None:
    source, copy = tiny("llama"), tmp_path / "copy"
    copy.mkdir()
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    counts = {"extra.counts": torch.arange(3)}
    save_file(load_file(copy / "model.safetensors") | counts, copy / "model.safetensors")
    plan = make_plan(recipe(WIDE), copy)
    assert "extra.counts stays I64, as it holds no floats" in plan.notes
    run(recipe(WIDE), copy, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")["extra.counts"]
    assert torch.equal(found, counts["extra.counts"])


def test_tensors_without_rows_are_cast_too(tiny, tmp_path: Path) -> None:
    odd = {
        "extra.scale": torch.tensor(0.1),
        "extra.zero": torch.tensor(0.0),
        "extra.none": torch.ones(0, 8),
    }
    source, copy = tiny("llama"), tmp_path / "copy"
    copy.mkdir()
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    save_file(load_file(copy / "model.safetensors") | odd, copy / "model.safetensors")
    run(recipe(cast("fp16")), copy, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in odd.items():
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor.half())
    save_file(load_file(copy / "model.safetensors") | {"extra.scale": torch.tensor(1e-9)},
              copy / "model.safetensors")  # fmt: skip
    (tmp_path / "second").mkdir()
    assert refusal(copy, tmp_path / "second").startswith(f"{AT}tensor 'extra.scale' would become 0")


def test_a_lost_row_of_one_expert_in_a_stack_is_refused_by_its_place() -> None:
    """Experts may lie as one tensor [experts, rows, columns]; zeros that were zeros are no loss."""
    name, weight = "model.layers.0.mlp.experts.down_proj", torch.ones(2, 4, 8)
    weight[0, 1], weight[1, 2] = 0.0, 1e-9
    info = TensorInfo(name, "F32", (2, 4, 8), "model.safetensors", 0, weight.nbytes)
    source: Any = SimpleNamespace(tensors={name: info})

    def part(block: Any) -> Part:
        return Part(source, block, (name,), lambda _: weight, lambda _: iter([(0, weight)]))

    inside: Any = object()
    with pytest.raises(CheckpointError, match=r"row 1, 2 of tensor '.*' would become 0"):
        list(apply(part(inside), CastConfig("fp16")))
    # Outside of the blocks lie convolutions, whose rows have all that an output reads.
    ((_, _, cast_to),) = apply(part(None), CastConfig("fp16"))
    assert torch.equal(cast_to, weight.half())


def test_a_dtype_is_named_however_deep_it_lies() -> None:
    deep = {"dtype": "bfloat16", "thinker": {"text_config": {"torch_dtype": "bfloat16", "n": 1}}}
    assert _with_dtype(deep, torch.float16) == {
        "dtype": "float16",
        "thinker": {"text_config": {"torch_dtype": "float16", "n": 1}},
    }


def test_a_cast_that_changes_nothing_says_so(tiny) -> None:
    same, other = (
        make_plan(recipe(cast(x)), tiny("llama", dtype="bf16")) for x in ("bf16", "fp16")
    )
    line = "cast to bf16 changes nothing: every tensor is stored so already"
    assert line in same.notes
    assert not any("changes nothing" in x for x in other.notes)


def test_report_and_card_tell_the_dtype_before_and_after(tiny, tmp_path: Path) -> None:
    report = run(recipe(cast("fp16")), tiny("llama", dtype="bf16"), tmp_path / "out")
    table = render_table(report)
    assert "Dtype     BF16 became F16" in table
    assert "Dtype" in render_html(report)
    parts = {part.name: (part.bytes_before, part.bytes_after) for part in report.result.sizes}
    assert parts["dense linears"][0] == parts["dense linears"][1] > parts["norms and other"][0]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "parameters in BF16" in card
    assert "parameters in F16" in card
