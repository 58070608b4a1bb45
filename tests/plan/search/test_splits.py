"""A budget of latents is split as all that follows takes it, and the plan says what may come."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.errors import CompressError, RecipeError
from compress.plan.plan import Plan
from compress.plan.search.later import check_rounded
from compress.plan.table import plan_table
from compress.report.html import render_html
from compress.verbs import make_plan, run
from helpers.short_runs import GPTQ, SELF, mla, recipe, text_source

Tiny = Callable[..., Path]
MHA = {"num_key_value_heads": 4}
CUT = {"method": "prune", "axes": ["ffn"], "budget": {"params": 0.8}, "multiple_of": 16}


def open_splits(plan: Plan) -> list[tuple[Any, Any]]:
    return [(x.rank, x.rope_dim) for edit in plan.edits for x in edit.splits]


def planned(source: Path, *stages: Any, **rest: Any) -> Plan:
    return make_plan(recipe(*stages, calibration=SELF, **rest), source)


def bytes_of(folder: Path) -> int:
    return sum(x.stat().st_size for x in folder.glob("*.safetensors"))


def test_only_splits_that_later_stages_take_are_measured(tiny: Tiny) -> None:
    source = tiny("llama", **MHA)
    alone, rounded = (planned(source, mla(kv_bytes=0.5), *x) for x in ((), (GPTQ,)))
    assert len(open_splits(alone)) == 5
    assert open_splits(rounded) == [
        (rank, key) for rank, key in open_splits(alone) if not rank % 32
    ]
    assert "stages behind it do not take 56 + 8, 52 + 12" in plan_table(rounded)
    assert "numbers its latent and its rotated key have is measured: 56 + 8, 52 + 12" in plan_table(
        alone
    )


def test_a_run_takes_a_split_that_the_rounding_behind_it_takes(tiny: Tiny, tmp_path: Path) -> None:
    """48 + 16 would lose less, and has no groups of 32."""
    source, data = tiny("llama", **MHA), text_source(tmp_path)
    asked = recipe(mla(kv_bytes=0.5), GPTQ, calibration=data)
    plan = make_plan(asked, source)
    run(asked, source, tmp_path / "out")
    stage = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())["stages"][0]
    assert (stage["rank"], stage["rope_dim"]) == (32, 32)
    assert plan.bytes_range == (bytes_of(tmp_path / "out"),) * 2


@pytest.mark.parametrize(
    ("budget", "line"),
    [
        (0.45, "is 0.45, which is 57 numbers a token; stages behind it take none of its splits"),
        (0.2, "not a multiple of 32 (nor has 1 more layer); raise kv_bytes"),
    ],
)
def test_a_budget_without_such_a_split_is_refused_with_what_to_do(
    tiny: Tiny, budget: float, line: str
) -> None:
    source, stage = tiny("llama", **MHA), mla(kv_bytes=budget, rope="stride")
    with pytest.raises(RecipeError) as caught:
        planned(source, stage, GPTQ)
    said = str(caught.value)
    assert "stages[0].kv_bytes" in said
    assert line in said
    assert "\n" not in said
    remedy = re.search(r"; give stages\[0\] multiple_of: (\d+)$", said)
    assert (remedy is not None) == (budget == 0.45)
    if remedy is not None:
        assert open_splits(planned(source, {**stage, "multiple_of": int(remedy[1])}, GPTQ))


@pytest.mark.parametrize(
    ("behind", "line"),
    [
        ({**GPTQ, "targets": ["nothing"]}, "targets[0]: 'nothing' matches no layer"),
        ({"method": "cast", "dtype": "fp16"}, "stages[1]: fp16 has no numbers as small"),
        ({**GPTQ, "group_size": 48}, "not a multiple of 48"),
    ],
)
def test_what_no_split_would_mend_is_refused_at_its_own_place(
    tiny: Tiny, behind: dict[str, Any], line: str
) -> None:
    with pytest.raises(CompressError) as caught:
        planned(tiny("llama", **MHA), mla(kv_bytes=0.6), behind)
    assert line in str(caught.value)
    assert "multiple_of:" not in str(caught.value)


@pytest.mark.usefixtures("answered_here")
@pytest.mark.parametrize("before", [(), (CUT,)], ids=["alone", "behind a prune"])
def test_the_result_lies_between_what_the_plan_says(
    tiny: Tiny, tmp_path: Path, before: tuple[Any, ...]
) -> None:
    source, data = tiny("llama", **MHA), text_source(tmp_path)
    asked = recipe(*before, mla(kv_bytes=0.5), calibration=data)
    plan = make_plan(asked, source)
    report = run(asked, source, tmp_path / "out")
    assert plan.bytes_range is not None
    low, high = plan.bytes_range
    assert low < high
    assert low <= bytes_of(tmp_path / "out") <= high
    assert f"range    {low} to {high} bytes" in plan_table(plan)
    assert report.plan_vs_actual is not None
    assert report.plan_vs_actual.bytes_range == (low, high)
    assert "measurement had chosen sizes" in render_html(report)


def test_the_range_is_that_of_all_splits_one_by_one(tiny: Tiny) -> None:
    source = tiny("llama", **MHA)
    plan = planned(source, mla(kv_bytes=0.4))
    each = [
        planned(source, mla(rank=rank, rope_dim=key)).shards.total_bytes
        for rank, key in open_splits(plan)
    ]
    assert plan.bytes_range == (min(each), max(each))


def test_layers_that_are_not_rounded_ask_for_nothing(tiny: Tiny) -> None:
    """Any rank will do where what reads the latent stays as it is."""
    plan = planned(tiny("llama", **MHA), mla(kv_bytes=0.5), {**GPTQ, "ignore": ["kv_b_proj"]})
    assert len(open_splits(plan)) == 5
    check_rounded(plan.given, plan.rounded)
