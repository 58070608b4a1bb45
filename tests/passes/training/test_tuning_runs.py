"""A training behind the stages that round: codes stay, scales and norms learn from the source."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compress.errors import RecipeError
from compress.plan.table import plan_table
from compress.recipe.dump import dump
from compress.recipe.reading.parse import parse
from compress.report.terminal.table import render_table
from compress.verbs import make_plan, run
from helpers.short_runs import kill_at_each_fifth, killed_at, recipe, result_of, text_source

pytestmark = pytest.mark.usefixtures("answered_here")
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
RTN = {"method": "rtn", "scheme": "W4A16", "group_size": 16}
ASYM = {"method": "rtn", "scheme": {"bits": 3, "symmetric": False, "group_size": 16}}
AWQ = {"method": "rtn", "scheme": "W4A16_ASYM", "group_size": 32}
RUNS = [
    ("compressed-tensors", ASYM, "weight_scale", "block"),
    ("gptq", RTN, "scales", "model"),
    ("compressed-tensors", RTN, "weight_scale", "model"),
    ("gptq", RTN | {"method": "gptq", "act_order": "group"}, "scales", "block"),
    ("gptq_v2", RTN, "scales", "model"),
    ("awq", AWQ, "scales", "block"),
    ("awq", AWQ, "scales", "model"),
]


def tune(tokens: int = 320, **options: Any) -> dict[str, Any]:
    few = {"batch": 4, "every": 4, "length": 8}
    return {"method": "distill", "tokens": tokens, "train": ["scales", "norms"], **few, **options}


@pytest.mark.parametrize(
    ("fmt", "rounding", "scales", "scope"),
    [
        pytest.param(*each, marks=[] if i < 2 else pytest.mark.long, id=f"{each[0]}-{each[3]}-{i}")
        for i, each in enumerate(RUNS)
    ],
)
def test_scales_and_norms_learn_and_all_else_stays(
    tiny, tmp_path: Path, fmt: str, rounding: Mapping[str, Any], scales: str, scope: str
) -> None:
    source, rest = tiny("llama"), {"output": {"format": fmt}}
    data = text_source(tmp_path)
    alone = rest | ({"calibration": data} if rounding["method"] == "gptq" else {})
    run(recipe(rounding, **alone), source, tmp_path / "rounded")
    asked = recipe(rounding, tune(scope=scope), calibration=data, **rest)
    report = run(asked, source, tmp_path / "out")
    losses = [(x.start, x.end) for stage in report.stages for x in stage.courses]
    assert sum(end for _, end in losses) < sum(start for start, _ in losses)
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("rounded", "out"))
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(name.endswith(scales) for name in moved)
    assert all(name.endswith((scales, "norm.weight")) for name in moved), moved
    one, other = result_of(tmp_path / "rounded"), result_of(tmp_path / "out")
    differ = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    assert differ <= {"model.safetensors", "recipe.yaml", "README.md"}
    assert "Trained" in render_table(report)


@pytest.mark.parametrize("scope", ["model", pytest.param("block", marks=pytest.mark.long)])
def test_what_gained_nothing_is_undone(tiny, tmp_path: Path, scope: str) -> None:
    """A rate at which it diverges leaves all bytes as rounding left them."""
    source, data = tiny("llama"), text_source(tmp_path)
    run(recipe(RTN), source, tmp_path / "rounded")
    asked = recipe(RTN, tune(scope=scope, rate=1e3), calibration=data)
    report = run(asked, source, tmp_path / "out")
    assert all(x.end == x.start for stage in report.stages for x in stage.courses)
    one, other = ((tmp_path / x / "model.safetensors").read_bytes() for x in ("rounded", "out"))
    assert one == other


def test_each_scope_is_a_pass_behind_the_one_that_rounds(tiny, tmp_path: Path) -> None:
    data = text_source(tmp_path)
    plan = make_plan(recipe(RTN, tune(), tune(train="norms"), calibration=data), tiny("llama"))
    names = ["quantize", "stage.1.block", "stage.1.model", "stage.2.block", "stage.2.model"]
    assert [each.name for each in plan.passes] == names
    assert {each.layout.total_bytes for each in plan.passes} == {plan.shards.total_bytes}
    assert not plan.edits
    assert [line for line in plan_table(plan).splitlines() if line.startswith("then")] == [
        f"then     {stage.describe()}" for stage in plan.recipe.tuning
    ]


@pytest.mark.long
@killed_at(500, 999)
def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    tiny, tmp_path: Path, first: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.passes.training.whole.SAVED_EVERY", 0.0)
    (tmp_path / "runs").mkdir()
    data = text_source(tmp_path, samples=2, length=8)
    asked = recipe(RTN, tune(96), calibration=data)
    killed = kill_at_each_fifth(asked, tiny("llama", **SMALL), tmp_path / "runs", first, step)
    assert killed.total()


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([RTN, tune(train="all")], "stages[1]: distill trains weights (all), and stages[0] rounds"),
        ([tune(), RTN], "stages[0]: trains scales and norms of rounded layers, and no stage in"),
        ([RTN, tune(), RTN], "stages[2]: rounds layers, and stages[1] trains what is rounded"),
        ([RTN, tune(train=["scales", "all"])], "train is [scales, all]; it takes all, changed or"),
        ([RTN, tune(train=[])], "train is []; it takes all"),
    ],
)
def test_what_stands_at_the_wrong_place_is_refused(
    stages: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(*stages, calibration={"sources": "self"})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rounding", "output", "message"),
    [
        (RTN, "dense", "the result stores dequantized weights, which have no scales; take"),
        (RTN | {"scheme": "W8A8", "group_size": 0}, "auto", "rounds inputs too"),
        ({"method": "fp8", "scheme": "FP8_DYNAMIC"}, "auto", "are floats, and scales of integers"),
        (RTN | {"targets": ["lm_head"]}, "auto", "no linear of a block is rounded"),
    ],
)
def test_codes_without_scales_to_train_are_refused_by_the_plan(
    tiny, rounding: dict[str, Any], output: str, message: str
) -> None:
    if rounding.get("group_size") == 0:
        rounding = {key: value for key, value in rounding.items() if key != "group_size"}
    asked = recipe(rounding, tune(), calibration={"sources": "self"}, output={"format": output})
    with pytest.raises(RecipeError) as caught:
        make_plan(asked, tiny("llama", tie_word_embeddings=False))
    assert "stages[1].train" in str(caught.value)
    assert message in str(caught.value)


def test_a_recipe_that_tunes_is_read_again_as_it_was_written() -> None:
    asked = recipe(RTN, tune(), calibration={"sources": "self"})
    assert parse(dump(asked)) == asked
    assert asked.tuning[0].config.train == ("scales", "norms")


def test_its_texts_are_told_in_words() -> None:
    (stage,) = recipe(RTN, tune(sources=[{"text": "a.txt"}])).tuning
    assert f"sources kind text path {Path.cwd() / 'a.txt'}," in stage.describe()
