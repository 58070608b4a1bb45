"""A budget says what may be left, and a search finds the sizes that lose the least for it."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from compress.errors import CheckpointError, RecipeError
from compress.passes.structure import search
from compress.plan.search import costs
from compress.recipe import Recipe, load
from compress.recipe.dump import dump
from compress.recipe.reading.parse import parse
from compress.report.html import render_html
from compress.report.terminal.table import render_table
from compress.verbs import RunOptions, make_plan, run
from helpers.short_runs import RTN, SELF, kill_at_each_fifth, recipe, result_of, text_source

pytestmark = pytest.mark.usefixtures("answered_here")
SMALL = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "dtype": "fp32"}

FEW = {**SMALL, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is measured in one test is not known in another."""
    monkeypatch.setattr(costs, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the passes that are tried, one by one."""
    seen, really = [], search.loss_of

    def counted(bench: Any, planned: Any) -> float:
        seen.append(planned.name)
        return really(bench, planned)

    monkeypatch.setattr(search, "loss_of", counted)
    return seen


def prune(axes: tuple[str, ...] = ("ffn", "layers"), **rest: Any) -> dict[str, Any]:
    return {"method": "prune", "axes": list(axes), "multiple_of": 32, **rest}


def params_in(folder: Path) -> int:
    """Counted from the files themselves."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as held:
            names = held.keys()  # safe_open is no mapping: it is not iterated itself
            total += sum(prod(held.get_slice(name).get_shape()) for name in names)
    return total


def with_idle_parts(source: Path, folder: Path) -> Path:
    """The model with a block that writes nothing, and half of all channels idle."""
    weights = load_file(source / "model.safetensors")
    for block in range(4):
        weights[f"model.layers.{block}.mlp.down_proj.weight"][:, 1::2] = 0
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.2.{name}.weight"].zero_()
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_what_writes_nothing_goes(tiny, tmp_path: Path) -> None:
    """Only half of the channels and one block less lose nothing at all at this budget."""
    source = with_idle_parts(tiny("llama", **SMALL), tmp_path / "source")
    data = text_source(tmp_path, samples=8)
    known = recipe({"method": "prune", "sizes": {"ffn": 32, "layers": [0, 1, 3]}}, calibration=data)
    budget = make_plan(known, source).result.params
    asked = recipe(prune(budget={"params": budget}), calibration=data)
    report = run(asked, source, tmp_path / "out")
    (edit,) = load(tmp_path / "out" / "recipe.yaml").edits
    assert (edit.config.sizes.ffn, edit.config.sizes.layers) == (32, (0, 1, 3))
    assert params_in(tmp_path / "out") == budget
    (best,) = [x for x in report.stages[0].candidates if x.place]
    assert best.loss < 1e-6
    assert all(x.loss >= best.loss for x in report.stages[0].candidates if x.predicted is not None)
    run(known, source, tmp_path / "known")
    mine, theirs = (result_of(tmp_path / x) for x in ("out", "known"))
    assert mine["model.safetensors"] == theirs["model.safetensors"]


@pytest.mark.parametrize("measure", ["bytes", "kv_bytes_per_token"])
def test_the_budget_is_met_and_the_plan_has_the_result_in_its_range(
    tiny, tmp_path: Path, measure: str
) -> None:
    source = tiny("llama", **FEW)
    axes = ("heads", "layers") if measure == "kv_bytes_per_token" else ("ffn", "layers")
    asked = recipe(prune(axes, budget={measure: 0.7}), calibration=text_source(tmp_path))
    plan = make_plan(asked, source)
    report = run(asked, source, tmp_path / "out")
    files = [x.stat().st_size for x in (tmp_path / "out").glob("*.safetensors")]
    before, after = {
        "bytes": (plan.source_bytes, sum(files)),
        "kv_bytes_per_token": (plan.kv_bytes_per_token[0], report.result.kv_bytes_per_token),
    }[measure]
    assert after <= 0.7 * before
    assert {x.takes for x in report.stages[0].candidates if x.place} == {after} or (
        measure == "bytes"  # of which headers are counted as the source's
    )
    assert plan.bytes_range is not None
    low, high = plan.bytes_range
    assert low <= sum(files) <= high
    assert plan.to_json()["result_bytes_range"] == [low, high]
    assert "Sizes" in render_table(report)
    assert "chosen" in render_html(report)


@pytest.mark.long
def test_a_second_target_measures_only_what_is_new(tiny, tmp_path: Path, trials) -> None:
    source, data = tiny("llama", **FEW), text_source(tmp_path)
    axes = ("ffn", "heads", "layers")
    for name, share in (("first", 0.8), ("again", 0.8), ("less", 0.7)):
        trials.clear()
        run(
            recipe(prune(axes, budget={"params": share}), calibration=data), source, tmp_path / name
        )
        made = len(trials)
        record = json.loads((tmp_path / name / "report" / "report.json").read_text())
        listed = len(record["stages"][0]["candidates"])
        if name == "first":
            assert made == listed
        elif name == "again":
            assert made == 0
        else:
            assert 0 < made < listed
    assert result_of(tmp_path / "first") == result_of(tmp_path / "again")


def test_only_sizes_that_later_stages_take_are_chosen(tiny, tmp_path: Path) -> None:
    """Groups of 32 columns do not divide 48, which the budget would allow."""
    source = tiny("llama", **{**FEW, "intermediate_size": 96})
    stage = {**prune(("ffn",), budget={"params": 0.8}), "multiple_of": 16}
    data = text_source(tmp_path)
    for stages, ffn in (((stage,), 48), ((stage, RTN), 32)):
        plan = make_plan(recipe(*stages, calibration=data), source)
        run(recipe(*stages, calibration=data), source, tmp_path / str(ffn))
        config = json.loads((tmp_path / str(ffn) / "config.json").read_text())
        assert config["intermediate_size"] == ffn
        files = [x.stat().st_size for x in (tmp_path / str(ffn)).glob("*.safetensors")]
        assert plan.bytes_range == (sum(files), sum(files))


def few(tmp_path: Path) -> Recipe:
    """A search of few trials."""
    data = text_source(tmp_path, samples=3, length=8)
    return recipe(prune(("ffn",), budget={"params": 0.85}), calibration=data)


@pytest.mark.long
def test_interrupted_among_its_trials_it_makes_the_same_choice(
    tiny, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache, so that each process measures for itself."""
    own_cache.write_text("no folder")
    source, asked = tiny("llama", **FEW), few(tmp_path)
    run(asked, source, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(search, "_together", _stopped)
        with pytest.raises(KeyboardInterrupt):
            run(asked, source, tmp_path / "out")
    run(asked, source, tmp_path / "out", options=RunOptions(resume=True))
    assert result_of(tmp_path / "out") == result_of(tmp_path / "whole")


def _stopped(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.long
@pytest.mark.parametrize("first", range(5))
def test_killed_anywhere_it_makes_the_same_choice(
    tiny, tmp_path: Path, own_cache: Path, first: int
) -> None:
    own_cache.write_text("no folder")
    (tmp_path / "runs").mkdir()
    killed = kill_at_each_fifth(few(tmp_path), tiny("llama", **FEW), tmp_path / "runs", first)
    assert killed.total() > 1


def test_a_search_is_written_out_and_read_again(tmp_path: Path) -> None:
    asked = recipe(prune(budget={"bytes": "5GB"}), calibration=SELF)
    assert asked.edits[0].config.budget.bytes == 5_000_000_000
    assert parse(dump(asked)).edits == asked.edits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": {"params": 0.01}}, "a share of 0."),
        ({"budget": {"params": 10**9}}, "budget: is 1,000,000,000 parameters, and the source"),
        ({"budget": {"params": 1.0}}, "parameters: nothing would be saved; give less"),
        ({"budget": {"params": 0.5, "bytes": 0.5}}, "budget has params and bytes; it takes one of"),
        ({"budget": {}}, "budget has nothing; it takes one of params, bytes, kv_bytes_per_token"),
        ({"budget": {"params": 0}}, "is 0; 1 or more must stay"),
        ({"budget": {"parms": 0.5}}, "did you mean 'params'?"),
        ({"axes": ["ffn", "width"]}, "is 'width'; allowed: ffn, heads, kv_heads, experts, layers"),
        ({"axes": ["ffn", "ffn"]}, "axes is [ffn, ffn]; it takes one or more, each once"),
        ({"multiple_of": 64}, "axes: has ffn, of which the model has 64 and multiple_of is 64"),
        ({"sizes": {"ffn": 8}}, "sizes is given beside budget"),
        ({"budget": None}, "budget is missing"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_work(
    tiny, options: dict[str, Any], message: str
) -> None:
    asked = {**prune(budget={"params": 0.7}), **options}
    with pytest.raises((RecipeError, CheckpointError)) as caught:
        make_plan(recipe(asked, calibration=SELF), tiny("llama", **SMALL))
    assert message in str(caught.value)


def test_an_axis_that_the_class_refuses_is_named(tiny) -> None:
    """Heads of gpt2 times their width are its hidden size."""
    asked = recipe(prune(("heads",), budget={"params": 0.9}), calibration=SELF)
    with pytest.raises(CheckpointError, match="axes: has heads, on which nothing can go: gpt2"):
        make_plan(asked, tiny("gpt2"))
    asked = recipe(prune(("kv_heads",), budget={"params": 0.9}), calibration=SELF)
    with pytest.raises(
        RecipeError, match="axes: has kv_heads, and each of the model's query heads"
    ):
        make_plan(asked, tiny("gpt2"))
