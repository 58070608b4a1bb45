"""Overrides of a stage through the whole run: plan, weights, report, recipe.yaml."""

import json
from pathlib import Path
from typing import Any

import pytest

from compress.checkpoint import Checkpoint
from compress.errors import RecipeError
from compress.formats import open_weights
from compress.recipe.reading.parse import parse
from compress.verbs import make_plan, plan_table, run
from conftest import tree_hashes
from helpers.short_runs import GPTQ, RTN, recipe, recipe_file, text_source

DOWN = {"targets": ["down_proj"], "bits": 8}
SKIP = {"targets": ["model.layers.0.*"], "skip": True}
SKIPPED = "skipped by 'model.layers.0.*' in stages[0].overrides[1].targets"
AWQ = {"method": "awq", "grid": 5}


def stored(out: Path) -> dict[str, str]:
    """By layer name, the scheme of what was written."""
    weights = open_weights(Checkpoint.open(out))
    found = {x.name: weights.quantized(x.tensor) for x in weights.spec.linears()}
    return {name: "dense" if q is None else q.scheme.describe() for name, q in found.items()}


def files(out: Path) -> dict[str, str]:
    return {k: v for k, v in tree_hashes(out).items() if not k.startswith("report/")}


def test_gptq_with_a_wider_layer_and_a_block_left(tiny, tmp_path: Path) -> None:
    asked = recipe({**GPTQ, "overrides": [DOWN, SKIP]}, calibration=text_source(tmp_path))
    plan = make_plan(asked, tiny("llama"))
    planned = {m.linear.name: m.scheme.describe() for m in plan.modules}
    assert planned["model.layers.1.mlp.down_proj"] == "int8 sym g32"
    assert planned["model.layers.1.mlp.up_proj"] == "int4 sym g32"
    table = plan_table(plan, modules=True)
    (row,) = [x for x in table.splitlines() if x.startswith("model.layers.0.mlp.down_proj")]
    assert row.endswith(f"left    {SKIPPED}")

    report = run(asked, tiny("llama"), tmp_path / "out")
    written = stored(tmp_path / "out")
    assert {k: v for k, v in written.items() if v != "dense"} == planned
    assert all(scheme == "dense" for name, scheme in written.items() if ".0." in name)
    layers = {x.name: x for x in report.layers}
    assert layers["model.layers.0.self_attn.q_proj"].skipped_reason == SKIPPED
    assert layers["lm_head"].skipped_reason == "ignored by 'lm_head' in stages[0].ignore"
    assert layers["model.layers.1.mlp.down_proj"].method in ("gptq", "rtn")
    # Whoever rounds them, layers of one block are seen in one pass.
    assert layers["model.layers.1.mlp.down_proj"].passes == 1
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert sorted(g["weights"]["num_bits"] for g in config["config_groups"].values()) == [4, 8]


def test_the_same_bytes_as_stages_that_exclude_each_other(tiny, tmp_path: Path) -> None:
    calibration = text_source(tmp_path)
    run(
        recipe({**GPTQ, "overrides": [DOWN, SKIP]}, calibration=calibration),
        tiny("llama"),
        tmp_path / "one",
    )
    eight = {**GPTQ, "scheme": {"bits": 8}, "targets": ["model.layers.1.mlp.down_proj"]}
    others = {**GPTQ, "ignore": ["lm_head", "down_proj", "model.layers.0.*"]}
    run(recipe(others, eight, calibration=calibration), tiny("llama"), tmp_path / "two")
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    assert one.pop("recipe.yaml") != two.pop("recipe.yaml")
    weights = [name for name in one if name.endswith(".safetensors")]
    assert weights
    assert {name: one[name] for name in weights} == {name: two[name] for name in weights}


def test_the_recipe_of_the_result_repeats_it(tiny, tmp_path: Path) -> None:
    coarse = {"targets": ["self_attn.*"], "scale_search": "minmax", "group_size": 16}
    asked = recipe({**RTN, "overrides": [DOWN, SKIP, coarse]})
    run(asked, tiny("llama"), tmp_path / "out")
    written = parse((tmp_path / "out" / "recipe.yaml").read_text())
    assert written.stages == asked.stages
    run(written, tiny("llama"), tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "out")


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_scaling_before_overrides(tiny, tmp_path: Path, method: str) -> None:
    stages = ({"method": method}, {**GPTQ, "overrides": [DOWN, SKIP]})
    report = run(recipe(*stages, calibration=text_source(tmp_path)), tiny("llama"), tmp_path / "o")
    layers = {x.name: x for x in report.layers}
    assert stored(tmp_path / "o")["model.layers.1.mlp.down_proj"] == "int8 sym g32"
    reason = SKIPPED.replace("stages[0]", "stages[1]")
    assert layers["model.layers.0.mlp.up_proj"].skipped_reason == reason
    (note,) = layers["model.layers.1.mlp.up_proj"].folds
    assert note.startswith("stages[0], model.layers.1.post_attention_layernorm: ")
    assert "does not take" not in note


def test_an_override_of_scaled_experts_is_scaled_with_them(tiny, tmp_path: Path) -> None:
    """One norm is read by all experts: they are scaled alike, though one is stored wider."""
    wide = {"targets": ["re:.*\\.0\\.block_sparse_moe\\.experts\\.1\\..*"], "bits": 8}
    stage = {**AWQ, "scheme": "W4A16", "group_size": 32, "overrides": [wide]}
    report = run(
        recipe(stage, calibration=text_source(tmp_path)), tiny("mixtral"), tmp_path / "out"
    )
    layers = {x.name: x for x in report.layers}
    expert = "model.layers.0.block_sparse_moe.experts.{}.w1"
    assert layers[expert.format(1)].scheme == "int8 sym g32"
    assert layers[expert.format(0)].scheme == "int4 sym g32"
    assert layers[expert.format(1)].folds == layers[expert.format(0)].folds
    assert all("does not take" not in note for note in layers[expert.format(0)].folds)


def test_an_override_may_read_what_nothing_is_scaled_for(tiny, tmp_path: Path) -> None:
    """GPT-2's second linear reads an activation function: the override still is a scheme."""
    wide = {"targets": ["mlp.c_proj"], "bits": 8}
    stage = {**AWQ, "scheme": "W4A16", "group_size": 32, "overrides": [wide]}
    plan = make_plan(recipe(stage, calibration=text_source(tmp_path)), tiny("gpt2"))
    schemes = {m.linear.name: m.scheme.describe() for m in plan.modules}
    assert schemes["transformer.h.0.mlp.c_proj"] == "int8 sym g32"


def test_a_scaling_stage_whose_layers_are_all_skipped(tiny, tmp_path: Path) -> None:
    scaling = {**AWQ, "targets": ["model.layers.0.*"]}
    asked = recipe(scaling, {**GPTQ, "overrides": [SKIP]}, calibration=text_source(tmp_path))
    with pytest.raises(RecipeError, match="awq has no norm or linear to scale between; first"):
        make_plan(asked, tiny("llama"))


def test_merged_layers_and_groups_are_still_checked(tiny, tmp_path: Path) -> None:
    def refused(**override: Any) -> str:
        with pytest.raises(RecipeError) as caught:
            make_plan(recipe({**RTN, "overrides": [override]}), tiny("llama"))
        return str(caught.value)

    message = refused(targets=["q_proj"], bits=8)
    assert "model.layers.0.self_attn.q_proj would be int8 sym g32 and" in message
    assert "q_proj would be unquantized and" in refused(targets=["q_proj"], skip=True)
    message = refused(targets=["down_proj"], group_size=64)
    assert "stages[0].overrides[0].group_size: model.layers.0.mlp.down_proj has 96" in message
    assert "use group_size 32, 48, 96 or " in message
    assert message.endswith("granularity: channel without group_size")
    message = refused(targets=["down_proj"], scheme="W8A16", group_size=64)
    assert message.endswith("granularity: channel without group_size")


def test_the_remedy_for_a_group_is_of_the_override(tiny, tmp_path: Path) -> None:
    wide = {"method": "rtn", "scheme": "W8A16"}
    narrow = recipe_file(tmp_path, {**wide, "overrides": [{**DOWN, "granularity": "group"}]})
    with pytest.raises(RecipeError) as caught:
        make_plan(narrow, tiny("llama"))
    remedy = "stages[0].overrides[0].granularity=channel"
    assert str(caught.value).endswith(f"--set '{remedy}'")
    plan = make_plan(narrow, tiny("llama"), overrides=[remedy])
    assert {m.scheme.describe() for m in plan.modules} == {"int8 sym channel"}


def test_a_target_counts_what_overrides_leave_it(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ladder = [{"bits": bits, "group_size": 32} for bits in (3, 4, 8)]
    stage = {
        "method": "rtn",
        "candidates": ladder,
        "target": {"bits_per_weight": 6.0},
        "overrides": [{"targets": ["o_proj"], "scheme": "W8A16"}, SKIP],
    }
    asked = recipe(stage, calibration=text_source(tmp_path))
    before = make_plan(asked, tiny("llama"))
    assert before.budget is not None
    assert not any("o_proj" in name or ".0." in name for name in before.budget.open_layers)
    report = run(asked, tiny("llama"), tmp_path / "out")
    layers = {x.name: x for x in report.layers}
    assert layers["model.layers.1.self_attn.o_proj"].scheme == "int8 sym channel"
    assert layers["model.layers.0.self_attn.o_proj"].skipped_reason == SKIPPED
    assert layers["lm_head"].skipped_reason == "ignored by 'lm_head' in stages[0].ignore"
    plan = make_plan(asked, tiny("llama"))
    chosen = [m for m in plan.modules if m.linear.role != "o"]
    weights = sum(m.linear.shape[0] * m.linear.shape[1] for m in chosen)
    assert len({m.scheme for m in chosen}) > 1
    assert 8 * sum(m.bytes_after for m in chosen) / weights <= 6.0
    written = parse((tmp_path / "out" / "recipe.yaml").read_text())
    assert written.stages == plan.recipe.stages
    run(written, tiny("llama"), tmp_path / "again")
    one, two = files(tmp_path / "out"), files(tmp_path / "again")
    assert {k: v for k, v in one.items() if k != "recipe.yaml"} == {
        k: v for k, v in two.items() if k != "recipe.yaml"
    }


def test_a_target_has_merged_layers_whole(tiny, tmp_path: Path) -> None:
    stage = {
        "method": "rtn",
        "candidates": [{"bits": bits, "group_size": 32} for bits in (3, 4)],
        "target": {"bits_per_weight": 4.0},
        "overrides": [{"targets": ["q_proj"], "scheme": "W3A16", "group_size": 32}],
    }
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe(stage, calibration=text_source(tmp_path)), tiny("llama"))
    assert "stages[0].targets: model.layers.0.self_attn.v_proj gets its scheme" in str(caught.value)
    assert "self_attn.q_proj does not; runtimes merge the two" in str(caught.value)
