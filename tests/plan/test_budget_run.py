"""Schemes chosen by a target: units, bytes, the least loss, the cache, plans and reports."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from compress.arch.describe import describe
from compress.checkpoint import Checkpoint
from compress.checkpoint.outline import outline_of
from compress.errors import RecipeError
from compress.plan import sensitivity_cache
from compress.plan.budget import BudgetUnit, Sensitivities, budget_units, with_choice
from compress.recipe import Recipe
from compress.recipe.reading.parse import parse
from compress.report.html import render_html
from compress.report.terminal.table import render_table
from compress.runs import run as main_run
from compress.verbs import RunOptions, make_plan, plan_table, run
from conftest import tree_hashes
from helpers import faults
from helpers.short_runs import recipe, text_source

LADDER = [{"bits": bits, "group_size": 32} for bits in (3, 4, 8)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compress-model"


def asking(folder: Path, bits: float = 4.5, method: str = "rtn", **rest: Any) -> Recipe:
    stage = {
        "method": method,
        "candidates": LADDER,
        "target": {"bits_per_weight": bits},
        **rest,
    }
    return recipe(stage, calibration=text_source(folder))


def chosen(plan: Any) -> dict[str, str]:
    return {m.linear.name: m.scheme.describe() for m in plan.modules}


def layer_bytes(plan: Any) -> int:
    return sum(m.bytes_after for m in plan.modules)


def losses(units: tuple[BudgetUnit, ...], cache: Path) -> Sensitivities:
    (path,) = cache.glob("sensitivity-*.json")
    held = json.loads(path.read_text())
    assert held["shares"].keys() == {x.name for unit in units for x in unit.linears}
    return Sensitivities(held["shares"], held["errors"])


@pytest.mark.parametrize(
    ("sensitivity", "family"),
    [
        ("kl", "llama"),
        ("kl", "mixtral"),
        ("output_error", "gpt2"),
        ("output_error", "starcoder2"),
        pytest.param("kl", "gpt2", marks=pytest.mark.long),
        pytest.param("kl", "starcoder2", marks=pytest.mark.long),
        pytest.param("output_error", "llama", marks=pytest.mark.long),
        pytest.param("output_error", "mixtral", marks=pytest.mark.long),
    ],
)
def test_merged_layers_are_alike_and_the_bytes_within_the_target(
    tiny, tmp_path: Path, cache: Path, family: str, sensitivity: str
) -> None:
    source, asked = tiny(family), asking(tmp_path, sensitivity=sensitivity)
    before = make_plan(asked, source)
    report = run(asked, source, tmp_path / "out")
    after = make_plan(asked, source)
    assert before.budget is not None
    assert before.budget.is_open
    assert after.budget is not None
    assert not after.budget.is_open
    assert before.budget.low <= layer_bytes(after) <= before.budget.high
    assert report.result.bits_per_weight <= 4.5
    schemes = chosen(after)
    assert {x.name: x.scheme for x in report.layers if x.skipped_reason is None} == schemes
    assert len(set(schemes.values())) > 1
    checkpoint = Checkpoint.open(source)
    units = budget_units(asked, outline_of(checkpoint))
    for unit in units:
        assert len({schemes[x.name] for x in unit.linears}) == 1
    spec = describe(checkpoint.config, checkpoint.shapes)
    if spec.experts:
        assert any({x.role for x in unit.linears} == {"gate", "up", "down"} for unit in units)


def test_the_choice_is_that_of_brute_force(tiny, tmp_path: Path, cache: Path) -> None:
    source, asked = tiny("llama"), asking(tmp_path)
    run(asked, source, tmp_path / "out")
    units = budget_units(asked, outline_of(Checkpoint.open(source)))
    found = losses(units, cache)
    assert len(units) == 8
    limit = sum(unit.weights for unit in units) * 4.5 / 8
    best = float("inf")
    for picks in itertools.product(range(3), repeat=len(units)):
        if sum(u.sizes[i] for u, i in zip(units, picks, strict=True)) <= limit:
            total = sum(found.loss(u, u.schemes[i]) for u, i in zip(units, picks, strict=True))
            best = min(best, total)
    assert with_choice(asked, units, found)[1].predicted == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("signs", ["both", "positive"])
def test_measured_losses_are_those_of_what_was_written(
    tiny, tmp_path: Path, cache: Path, signs: str
) -> None:
    """rtn with the same search, one block: nothing before it is quantized, so nothing differs."""
    source = tiny("llama", num_hidden_layers=1, dtype="fp32")
    asked = asking(tmp_path, scale_search="importance", sensitivity="kl", signs=signs)
    report = run(asked, source, tmp_path / "out")
    assert report.budget is not None
    assert report.budget.loss.measured == pytest.approx(report.budget.loss.planned, rel=1e-3)
    assert report.budget.loss.planned > 0
    assert [stage.name for stage in report.stages] == ["quantize", "measure"]
    (row,) = [x for x in render_table(report).splitlines() if x.startswith("Loss of the layers")]
    assert row.endswith("predicted, measured")
    assert "Loss (kl)" in render_html(report)
    written = parse((tmp_path / "out" / "recipe.yaml").read_text())
    assert all(stage.target is None and stage.scheme is not None for stage in written.stages)
    assert "schemes chosen for 4.5 bits a weight, predicted loss" in written.description
    again = run(written, source, tmp_path / "again")
    assert [(x.name, x.scheme) for x in again.layers] == [(x.name, x.scheme) for x in report.layers]


def test_measured_once_for_all_targets(
    tiny, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny("llama")
    run(asking(tmp_path), source, tmp_path / "first")
    monkeypatch.setattr(main_run, "measure_layers", None)
    run(asking(tmp_path, bits=6.0), source, tmp_path / "second")
    assert make_plan(asking(tmp_path, bits=5.0, method="gptq"), source).budget is not None
    with pytest.raises(TypeError, match="not callable"):
        run(asking(tmp_path, signs="positive"), source, tmp_path / "positive")
    (tmp_path / "words.txt").write_text("other words than these were never seen here . " * 20)
    with pytest.raises(TypeError, match="not callable"):
        run(asking(tmp_path), source, tmp_path / "third")


def test_a_resumed_run_chooses_alike_and_ends_in_the_same_bytes(
    tiny, tmp_path: Path, cache: Path
) -> None:
    source, asked = tiny("llama"), asking(tmp_path, method="gptq")
    run(asked, source, tmp_path / "whole")
    for path in cache.glob("sensitivity-*.json"):
        path.write_text("{")
    with pytest.raises(faults.Killed), faults.fault_at(80):
        run(asked, source, tmp_path / "out")
    assert (tmp_path / "out.partial" / "journal.json").exists()
    for path in cache.glob("sensitivity-*.json"):
        path.unlink()
    run(asked, source, tmp_path / "out", options=RunOptions(resume=True))
    whole, resumed = (
        {k: v for k, v in tree_hashes(tmp_path / name).items() if not k.startswith("report/")}
        for name in ("whole", "out")
    )
    assert resumed == whole


def test_the_plan_says_what_is_open(tiny, tmp_path: Path, cache: Path) -> None:
    source, asked = tiny("llama"), asking(tmp_path)
    before = make_plan(asked, source)
    table = plan_table(before)
    assert "chosen by measurement" in table
    assert "(evaluation and the measurement of schemes not included)" in table
    assert "budget   4.5 bits a weight: layers take " in table
    assert before.to_json()["budget"]["predicted_loss"] is None
    assert not cache.exists()
    run(asked, source, tmp_path / "out")
    table = plan_table(make_plan(asked, source))
    assert "chosen by measurement" not in table
    assert "(evaluation not included)" in table
    assert "budget   4.5 bits a weight: schemes chosen, predicted loss " in table


def test_groups_that_do_not_divide_are_not_offered(tiny, tmp_path: Path, cache: Path) -> None:
    """down_proj has 96 columns, the others 64."""
    ladder = [{"bits": 4, "group_size": 64}, {"bits": 8, "group_size": 32}]
    asked = asking(tmp_path, bits=9.0, candidates=ladder)
    plan = make_plan(asked, tiny("llama"))
    assert chosen(plan)["model.layers.0.mlp.down_proj"] == "int8 sym g32"
    remark = (
        "int4 sym g64 was not open to model.layers.0.mlp.down_proj and 1 more: its groups do not"
        " divide their input columns"
    )
    assert remark in plan.warnings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target": {"bytes": "1kB"}},
            (
                "stages[0].target: the budget is 1,000 bytes, but the smallest schemes of all"
                " layers together take "
            ),
        ),
        (
            {"candidates": [{"bits": 4, "group_size": 40}, {"bits": 8, "group_size": 40}]},
            (
                "stages[0].candidates: model.layers.0.self_attn.q_proj has 64 input columns, which"
                " the groups of no candidate divide; add one with granularity: channel"
            ),
        ),
        (
            {"targets": ["*"], "ignore": []},
            (
                "stages[0].targets: lm_head is the output head, whose loss is not measured; give"
                " it a stage of its own with a scheme"
            ),
        ),
    ],
)
def test_refusals_before_work(tiny, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make_plan(asking(tmp_path, **changes), tiny("llama"))
    assert message in str(caught.value)


def test_an_unwritable_cache_stops_nothing(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    run(asking(tmp_path), tiny("llama"), tmp_path / "out")
    assert sensitivity_cache.cache_folder() == tmp_path / "file" / "compress-model"


def test_other_stages_keep_their_place(tiny, tmp_path: Path) -> None:
    """A stage behind one that becomes three is still found where it was written."""
    head = {"method": "rtn", "scheme": "W8A16", "targets": ["lm_head"], "ignore": []}
    first = {"method": "gptq", "candidates": LADDER, "target": {"bits_per_weight": 4.5}}
    asked = recipe(first, head, calibration=text_source(tmp_path))
    units = budget_units(asked, outline_of(Checkpoint.open(tiny("llama"))))
    flat = Sensitivities(
        {x.name: i + 1.0 for i, unit in enumerate(units) for x in unit.linears},
        {
            x.name: {s.describe(): 2.0**-s.bits for s in unit.schemes}
            for unit in units
            for x in unit.linears
        },
    )
    settled, _ = with_choice(asked, units, flat)
    assert len(settled.stages) > 2
    place = asked.places.table["stages[1].method"]
    assert settled.stages[-1].at("method") == f"{place}: stages[1].method"
