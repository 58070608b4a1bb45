"""`prune_width: {experts}`: mixtures lose experts, and those that stay make up for them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.edits import learned
from compress.edits.prune import PrunedSizes
from compress.errors import CheckpointError, RecipeError
from compress.plan.search import costs
from compress.recipe import load
from compress.report.html import render_html
from compress.report.terminal.table import render_table
from compress.verbs import make_plan, run
from helpers.in_transformers import lost
from helpers.short_runs import SELF, WORDS, kill_at_each_fifth, recipe, text_source
from helpers.tiny_models import MIXTURES

pytestmark = pytest.mark.usefixtures("answered_here")
TEXT = WORDS * 5
COUNTS = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}
FAMILIES = ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.long)]


def width(**options: Any) -> dict[str, Any]:
    return {"method": "prune_width", **options}


def with_idle_experts(source: Path) -> Path:
    """Routers of v, 0, -v, w and -w: two of the others are always above the second expert."""
    weights = load_file(source / "model.safetensors")
    for name, rows in weights.items():
        if rows.shape[0] == 5 and rows.dim() == 2:
            weights[name] = 20 * torch.stack([rows[0], 0 * rows[0], -rows[0], rows[3], -rows[3]])
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    return source


@pytest.mark.long  # every run looks at this on its first block
@pytest.mark.parametrize("family", MIXTURES)
def test_where_all_experts_stay_no_bit_changes(tiny, tmp_path: Path, family: str) -> None:
    source = tiny(family)
    asked = recipe(width(experts=1.0, ffn=1.0), calibration=text_source(tmp_path))
    run(asked, source, tmp_path / "out")
    before, after = (load_file(x / "model.safetensors") for x in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_budget_takes_the_expert_that_gets_no_token(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all sizes that meet the budget one expert less loses nothing."""
    monkeypatch.setattr(costs, "cache_folder", lambda: tmp_path / "cache")
    source = with_idle_experts(tiny("qwen3_moe", dtype="fp32", num_experts=5))
    data = text_source(tmp_path, samples=8)
    known = recipe({"method": "prune", "sizes": {"experts": 4}}, calibration=data)
    budget = {"params": make_plan(known, source).result.params}
    open_stage = {"method": "prune", "axes": ["ffn", "experts"], "multiple_of": 8, "budget": budget}
    report = run(recipe(open_stage, calibration=data), source, tmp_path / "out")
    (edit,) = load(tmp_path / "out" / "recipe.yaml").edits
    assert edit.config.sizes == PrunedSizes(experts=4)
    (best,) = [x for x in report.stages[0].candidates if x.place]
    assert best.loss < 1e-6
    assert best.sizes["experts"] == 4
    assert best.takes == budget["params"]
    assert "experts 4" in render_table(report)
    assert "Experts" in render_html(report)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "llama",
            {},
            "stages[0].axes: has experts, and the model is no mixture of experts; take it out",
        ),
        ("mixtral", {"select": "fluctuation"}, "select is fluctuation, which says nothing of exp"),
    ],
)
def test_experts_of_a_budget_that_cannot_be_are_refused(
    tiny, family: str, options: dict[str, Any], message: str
) -> None:
    stage = {"method": "prune", "axes": ["experts"], "budget": {"params": 0.8}, **options}
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe(stage, calibration=SELF), tiny(family))
    assert message in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_expert_that_gets_no_token_goes_without_a_loss(
    tiny, tmp_path: Path, family: str
) -> None:
    source = with_idle_experts(tiny(family, dtype="fp32", **{COUNTS[family]: 5}))
    asked = recipe(width(experts=4), calibration=text_source(tmp_path))
    report = run(asked, source, tmp_path / "out")
    routers = [x for x in report.stages[0].repairs if x.of == 5]
    assert [(x.kept, x.note) for x in routers] == [(4, "without 1 expert: 1")] * 2
    assert all(x.before is not None and x.before < 1e-6 for x in routers)
    assert lost(tmp_path / "out", source, TEXT) < 1e-9
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {config[key] for key in COUNTS.values() if key in config} == {4}


def enough_for(family: str, folder: Path) -> dict[str, Any]:
    """Half of all tokens go to an expert, and a fit that held-out ones do not confirm is dropped:
    256 confirm one of mixtral's six, with 96 columns each, and 3072 all. qwen3_moe's have 32.
    """
    if family == "qwen3_moe":
        return text_source(folder, samples=16)
    chance, words = random.Random(0), WORDS.split()
    (folder / "more.txt").write_text(" ".join(chance.choice(words) for _ in range(8000)))
    return {"sources": [{"text": str(folder / "more.txt")}], "samples": 96, "length": 32}


@pytest.mark.parametrize("family", FAMILIES)
def test_those_that_stay_make_up_for_those_that_go(tiny, tmp_path: Path, family: str) -> None:
    """A stock class loads it, with heads and channels cut in the same stage; bytes are as planned;
    the repair of experts adds to that of attention."""
    source, data, found = tiny(family, dtype="fp32"), enough_for(family, tmp_path), {}
    cuts = {"none": {"repair": "none"}, "drift": {}, "all": {"ffn": 0.75, "heads": 2}}
    for name, options in cuts.items():
        asked = recipe(width(experts=0.75, **options), calibration=data)
        report = run(asked, source, tmp_path / name)
        assert report.result.bytes == make_plan(asked, source).shards.total_bytes
        assert report.loads is not None
        assert report.loads.proof == "logits"
        found[name] = lost(tmp_path / name, source, TEXT)
        told = [x for x in report.stages[0].repairs if x.after is not None]
        experts = [x for x in told if "experts" in x.linear]
        assert all(x.after <= x.before for x in experts)
        assert len(experts) == (0 if name == "none" else 2 * 3)
        assert name == "none" or any(x.after < 0.9 * x.before for x in experts)
    assert {(x.kept, x.of) for x in experts} <= {(24, 32), (72, 96)}
    assert found["drift"] < 0.8 * found["none"]
    names = load_file(tmp_path / "all" / "model.safetensors")
    assert not any(".experts.3." in name for name in names)


@pytest.mark.parametrize(
    "options", [{"ffn": 0.75}, pytest.param({"experts": 3}, marks=pytest.mark.long)]
)
def test_experts_in_turns_change_as_together(
    tiny, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of those that are held to themselves; where they make up together, the report differs
    by what others made up before."""
    source, found = tiny("qwen3_moe", dtype="fp32", num_hidden_layers=1), {}
    asked = recipe(width(**options), calibration=text_source(tmp_path, samples=16))
    for name in ("together", "turns"):
        run(asked, source, tmp_path / name)
        found[name] = load_file(tmp_path / name / "model.safetensors")
        monkeypatch.setattr(learned, "MOMENTS", 1)
    same = [torch.equal(value, found["turns"][name]) for name, value in found["together"].items()]
    assert all(same) == ("ffn" in options)


@pytest.mark.long
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("select", ["activation", "contribution", "magnitude"])
def test_other_choices_and_a_narrower_stream(
    tiny, tmp_path: Path, family: str, select: str
) -> None:
    source, data = tiny(family, dtype="fp32"), text_source(tmp_path, samples=24)
    for name, options in {"plain": {}, "narrow": {"hidden": 0.75}}.items():
        asked = recipe(width(experts=3, select=select, **options), calibration=data)
        report = run(asked, source, tmp_path / name)
        assert report.loads is not None
        assert report.loads.proof == "logits"
    assert lost(tmp_path / "plain", source, TEXT) < lost(tmp_path / "narrow", source, TEXT)


@pytest.mark.long
@pytest.mark.parametrize("first", range(5))
def test_killed_anywhere_it_goes_on_to_the_same_bytes(tiny, tmp_path: Path, first: int) -> None:
    (tmp_path / "runs").mkdir()
    data = text_source(tmp_path, samples=2, length=8)
    small = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    asked = recipe(width(experts=3, ffn=8), calibration=data)
    assert kill_at_each_fifth(asked, tiny("qwen3_moe", **small), tmp_path / "runs", first).total()


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("qwen3_moe", {"experts": 0}, "is 0; 1 or more must stay"),
        ("qwen3_moe", {"experts": 5}, "stages[0].experts: is 5; the source has 4"),
        ("qwen3_moe", {"experts": 1}, "experts: is 1; it must be 2 to 4, the source's, as each"),
        ("mixtral", {"experts": 0.25}, "experts: is 1; it must be 2 to 4, the source's, as each"),
        ("llama", {"experts": 2}, "experts: is 2; the model is no mixture of experts, so leave it"),
        (
            "mixtral",
            {"experts": 2, "select": "fluctuation"},
            "select is fluctuation, which says nothing of experts",
        ),
    ],
)
def test_what_cannot_stay_is_refused_before_work(
    tiny, family: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((RecipeError, CheckpointError)) as caught:
        make_plan(recipe(width(**options), calibration=SELF), tiny(family))
    assert message in str(caught.value)
