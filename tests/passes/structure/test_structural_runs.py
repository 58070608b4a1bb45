"""Structural stages as a user runs them: stock classes load what comes out, and kills cost nothing.

At zero compression nothing changes; what is cut is closer to the source with repair than without.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import CheckpointError, RecipeError
from compress.passes.structure.attention.joint_norms import JointNorms
from compress.recipe import load
from compress.report.html import render_html
from compress.report.terminal.table import render_table
from compress.verbs import make_plan, run
from helpers.in_transformers import lost, said
from helpers.short_runs import (
    GPTQ,
    RTN,
    SELF,
    WORDS,
    kill_at_each_fifth,
    recipe,
    result_of,
    text_source,
)
from helpers.tiny_models import LANDINGS

pytestmark = pytest.mark.usefixtures("answered_here")
TEXT = WORDS * 5
# All that the families differ in: norms behind attention, fused linears, Conv1D, experts, biases.
FEW = ("llama", "gemma2", "gpt2", "qwen3_moe")
MORE = (
    *("phi3", "qwen2", "gpt_neox", "olmo2", "mixtral", "opt"),
    *("mistral", "qwen3", "gemma3_text", "smollm3"),
)
KINDS = [FEW[0], FEW[3], *(pytest.param(x, marks=pytest.mark.long) for x in (*FEW[1:3], *MORE))]
BY = pytest.mark.parametrize(
    "by", ["loss", *(pytest.param(x, marks=pytest.mark.long) for x in ("influence", "angular"))]
)
LONGER = [pytest.param(family, marks=pytest.mark.long) for family in (*FEW[1:3], *MORE, *LANDINGS)]


def width(**options: Any) -> dict[str, Any]:
    return {"method": "prune_width", **options}


def depth(**options: Any) -> dict[str, Any]:
    return {"method": "prune_depth", **options}


@pytest.mark.parametrize("family", KINDS)
def test_a_share_of_1_changes_no_bit(tiny, tmp_path: Path, family: str) -> None:
    source = tiny(family)
    asked = recipe(width(ffn=1.0, heads=1.0), calibration=text_source(tmp_path))
    run(asked, source, tmp_path / "out")
    before, after = (load_file(x / "model.safetensors") for x in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("family", [FEW[0], FEW[3], *LONGER])
def test_what_is_cut_loads_in_a_stock_class_and_repair_brings_it_closer(
    tiny, tmp_path: Path, family: str
) -> None:
    source, data, found = tiny(family, dtype="fp32"), text_source(tmp_path, samples=24), {}
    for repair in ("none", "output", "drift"):
        asked = recipe(width(ffn=0.5, repair=repair), calibration=data)
        out = tmp_path / repair
        report = run(asked, source, out)
        plan = make_plan(asked, source)
        assert report.result.bytes == plan.shards.total_bytes
        assert report.loads is not None
        assert report.loads.proof == "logits"
        told = report.stages[0].repairs
        assert {(x.kept, x.of) for x in told if "down" in x.linear} <= {(48, 96), (16, 32)}
        fitted = [x for x in told if x.after is not None]
        assert all(x.after <= x.before for x in fitted)
        assert bool(fitted) == (repair != "none")
        assert ("Refitted" in render_table(report)) == (repair != "none")
        assert "Missed, refitted" in render_html(report)
        found[repair] = lost(out, source, TEXT)
    assert found["drift"] < found["none"]
    assert found["output"] < found["none"]


@pytest.mark.long
@pytest.mark.parametrize("rank", [None, 24])
def test_a_narrower_stream_that_latents_read(tiny, tmp_path: Path, rank: int | None) -> None:
    """With what makes them among its readers, directions of the stream go that few read."""
    source, data = tiny("deepseek_v3", dtype="fp32", q_lora_rank=rank), text_source(tmp_path)
    asked = recipe(width(hidden=48), calibration=data)
    report = run(asked, source, tmp_path / "out")
    assert report.loads is not None
    assert report.loads.proof == "logits"
    assert torch.isfinite(said(tmp_path / "out", TEXT)).all()


def test_heads_of_groups_and_whole_groups_go(tiny, tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    source, data = tiny("qwen3", **sizes), text_source(tmp_path)
    cases = {
        (4, 4): {"heads": 0.7, "multiple_of": 64},
        (4, 2): {"kv_heads": 2},
        (2, 2): {"heads": 2, "kv_heads": 2},
    }
    for (heads, kv_heads), options in cases.items():
        out = tmp_path / f"{heads}.{kv_heads}"
        run(recipe(width(**options), calibration=data), source, out)
        config = json.loads((out / "config.json").read_text())
        assert (config["num_attention_heads"], config["num_key_value_heads"]) == (heads, kv_heads)
        assert torch.isfinite(said(out, TEXT)).all()


def test_blocks_go_and_those_before_take_over(tiny, tmp_path: Path) -> None:
    source = tiny("llama", num_hidden_layers=4, dtype="fp32")
    data = text_source(tmp_path, samples=24)
    for repair in ("none", "drift"):
        asked = recipe(depth(keep=[1, 3], repair=repair), calibration=data)
        run(asked, source, tmp_path / repair)
    assert lost(tmp_path / "drift", source, TEXT) < lost(tmp_path / "none", source, TEXT)
    before, after = (load_file(x / "model.safetensors") for x in (source, tmp_path / "none"))
    for old, new in ((1, 0), (3, 1)):
        name = "model.layers.{}.mlp.up_proj.weight"
        assert torch.equal(before[name.format(old)], after[name.format(new)])


@BY
def test_which_blocks_go_is_measured(tiny, tmp_path: Path, by: str) -> None:
    """The recipe in the result says which, and gives the same bytes where that is known."""
    source = tiny("llama", num_hidden_layers=4, dtype="fp32")
    data = text_source(tmp_path, samples=8)
    asked = recipe(depth(layers=0.5, by=by), RTN, calibration=data)
    assert make_plan(asked, source).shards.total_bytes
    report = run(asked, source, tmp_path / "open")
    (edit,) = load(tmp_path / "open" / "recipe.yaml").edits
    kept = edit.config.keep
    assert len(kept) == 2
    assert f"blocks {kept[0]} and {kept[1]} of 4 stay" in report.notes
    run(recipe(depth(keep=list(kept)), RTN, calibration=data), source, tmp_path / "known")
    mine, theirs = (result_of(tmp_path / name) for name in ("open", "known"))
    assert mine["model.safetensors"] == theirs["model.safetensors"]
    assert mine["config.json"] == theirs["config.json"]


@BY
def test_the_blocks_that_go_are_those_that_the_loss_misses_least(
    tiny, tmp_path: Path, by: str
) -> None:
    """A block that writes nothing is the first to go."""
    source = tiny("llama", num_hidden_layers=4, dtype="fp32")
    weights = load_file(source / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.2.{name}.weight"].zero_()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    asked = recipe(depth(layers=3, by=by), calibration=text_source(tmp_path))
    run(asked, source, tmp_path / by)
    (edit,) = load(tmp_path / by / "recipe.yaml").edits
    assert edit.config.keep == (0, 1, 3)
    assert lost(tmp_path / by, source, TEXT) < 1e-9


def test_later_stages_are_held_to_the_model_that_the_run_was_given(tiny, tmp_path: Path) -> None:
    """After a cut in depth each block still knows which of the source's blocks it stands for."""
    source = tiny("llama", num_hidden_layers=3, dtype="fp32")
    data, first = text_source(tmp_path, samples=24), depth(keep=[0, 2], repair="none")
    for repair in ("none", "drift"):
        asked = recipe(first, width(ffn=1.0, repair=repair), calibration=data)
        run(asked, source, tmp_path / repair)
    assert lost(tmp_path / "drift", source, TEXT) < lost(tmp_path / "none", source, TEXT)


def test_a_later_pass_rounds_what_structural_stages_leave(tiny, tmp_path: Path) -> None:
    source, data = tiny("llama"), text_source(tmp_path)
    asked = recipe(width(ffn=64), GPTQ, calibration=data)
    whole = run(asked, source, tmp_path / "whole")
    assert [stage.name for stage in whole.stages] == ["prune_width", "quantize"]
    assert whole.calibration is not None
    run(recipe(width(ffn=64), calibration=data), source, tmp_path / "1")
    run(recipe(GPTQ, calibration=data), tmp_path / "1", tmp_path / "2")
    mine, theirs = (result_of(tmp_path / name) for name in ("whole", "2"))
    for written in (mine, theirs):
        assert written.pop("README.md")
        assert written.pop("recipe.yaml")
    assert mine == theirs


@pytest.mark.long
def test_activations_are_summed_up_as_asked(tiny, tmp_path: Path) -> None:
    """Channels that vary most are others than those that are largest."""
    source, data, found = tiny("llama"), text_source(tmp_path), []
    for options in ({}, {"aggregate": ["mean", "l2"]}, {"aggregate": ["variance", "mean"]}):
        stage = width(ffn=0.5, select="activation", repair="none", **options)
        run(recipe(stage, calibration=data), source, tmp_path / str(len(found)))
        found.append(result_of(tmp_path / str(len(found)))["model.safetensors"])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(("first", "step"), [pytest.param(1, 401, id="some"), *(
    pytest.param(i, 5, marks=pytest.mark.long) for i in range(5))])  # fmt: skip
def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    tiny, tmp_path: Path, first: int, step: int
) -> None:
    (tmp_path / "runs").mkdir()
    asked = recipe(
        width(ffn=16), depth(layers=1), {"method": "rtn", "scheme": "W8A16"},
        calibration=text_source(tmp_path, samples=2, length=8),
    )  # fmt: skip
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    killed = kill_at_each_fifth(asked, tiny("llama", **small), tmp_path / "runs", first, step)
    assert killed.total()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ffn": 0}, "is 0; 1 or more must stay"),
        ({"ffn": 0.0}, "is 0.0; a share of the source's is above 0 and at most 1.0"),
        ({"ffn": 97}, "stages[0].ffn: is 97; the source has 96"),
        ({"ffn": 0.1, "multiple_of": 64}, "of the source's 96 that is less than 64"),
        ({"heads": 3}, "heads: is 3; with kv_heads 2 it must be 2 or 4"),
        ({}, "ffn, heads, kv_heads, experts and hidden are missing"),
        ({"ffn": 8, "targets": ["*"]}, "unknown key 'targets'"),
        ({"ffn": 8, "select": "obz"}, "is 'obz'; allowed: obs"),
        ({"ffn": 8, "aggregate": ["l2", "l2"]}, "aggregate is that of select: activation, and"),
        (
            {"hidden": 8, "select": "activation", "aggregate": ["l2", "l2"]},
            "aggregate is that of ffn, heads and kv_heads, and none of them is cut",
        ),
        (
            {"ffn": 8, "select": "activation", "aggregate": ["l2"]},
            "aggregate names 1; it takes two",
        ),
    ],
)
def test_what_cannot_stay_is_refused_before_work(
    tiny, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((RecipeError, CheckpointError)) as caught:
        make_plan(recipe(width(**options), calibration=SELF), tiny("llama"))
    assert message in str(caught.value)


def test_data_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="'prune_width' needs calibration data"):
        recipe(width(ffn=8))
    with pytest.raises(RecipeError, match=r"calibration.samples: is 1; .* 2 or more"):
        recipe(width(ffn=8), calibration={"sources": "self", "samples": 1})


def with_loud_heads(source: Path, folder: Path) -> Path:
    """Heads 2 and 3 of all layers: queries and keys four times as large, and hardly an output."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    for name, value in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            value[32:] *= 4
        if "o_proj" in name:
            value[:, 32:] *= 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_norms_over_all_heads_give_those_that_stay_what_they_gave_them(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heads that go are most of what queries and keys were divided by."""
    source = with_loud_heads(tiny("olmo2", num_key_value_heads=4, dtype="fp32"), tmp_path / "loud")
    stage = width(heads=2, select="contribution", repair="none")
    asked = recipe(stage, calibration=text_source(tmp_path))
    run(asked, source, tmp_path / "out")
    monkeypatch.setattr(JointNorms, "scales", lambda *_: {})
    run(asked, source, tmp_path / "as-they-are")
    assert lost(tmp_path / "out", source, TEXT) < 0.2 * lost(tmp_path / "as-they-are", source, TEXT)


@pytest.mark.parametrize(
    "stage",
    [depth(layers=1), {"method": "prune", "budget": {"params": 0.8}, "axes": ["layers"]}],
    ids=["prune_depth", "prune"],
)
def test_blocks_that_compute_by_their_place_are_no_choice(tiny, stage: dict[str, Any]) -> None:
    """Whichever is measured to go, the plan says so before."""
    source = tiny("gpt2", scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(CheckpointError, match=r"block 1 would become block 0"):
        make_plan(recipe(stage, calibration=SELF), source)
