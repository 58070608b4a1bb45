"""Width and bits share the bytes of one budget: what loses least of both together is taken."""

import copy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from compress.checkpoint import Checkpoint
from compress.errors import RecipeError
from compress.plan import sensitivity_cache
from compress.plan.search import costs
from compress.plan.search.bits import least_bytes
from compress.plan.search.space import space_of
from compress.plan.table import plan_table
from compress.recipe import load
from compress.verbs import make_plan, run
from helpers.short_runs import SELF, kill_at_each_fifth, killed_at, recipe, text_source

pytestmark = pytest.mark.usefixtures("answered_here")
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "dtype": "fp32"}
EIGHT, FOUR = ({"bits": bits, "group_size": 32} for bits in (8, 4))
ROUND = {"method": "rtn", "candidates": [EIGHT, FOUR]}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (costs, sensitivity_cache):
        monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")


def prune(budget: Any, axes: tuple[str, ...] = ("ffn",), **rest: Any) -> dict[str, Any]:
    stage = {"method": "prune", "axes": list(axes), "multiple_of": 32, "budget": {"bytes": budget}}
    return {**stage, **rest}


def weights_of(folder: Path) -> int:
    return sum(x.stat().st_size for x in folder.glob("*.safetensors"))


def with_idle_channels(source: Path, folder: Path) -> Path:
    """The model with half of the channels of the MLP writing nothing."""
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("down_proj.weight"):
            weight[:, 1::2] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def of_four_bits(source: Path, folder: Path) -> Path:
    """All weights of blocks are those of four bits."""
    run(recipe({"method": "rtn", "scheme": FOUR}, output={"format": "dense"}), source, folder)
    return folder


def test_one_budget_takes_width_or_bits_as_loses_less(tiny, tmp_path: Path) -> None:
    """Channels that write nothing go and 8 bits stay; weights of 4 bits are stored in 4, and all
    channels stay."""
    idle = with_idle_channels(tiny("llama", **SMALL), tmp_path / "source")
    data = text_source(tmp_path, samples=8)
    cut = recipe(
        {"method": "prune", "sizes": {"ffn": 32}}, {"method": "rtn", "scheme": EIGHT},
        calibration=data,
    )  # fmt: skip
    budget = make_plan(cut, idle).shards.total_bytes + 1000
    asked = recipe(prune(budget), ROUND, calibration=data)
    plan = make_plan(asked, idle)
    told = plan_table(plan)
    assert "shown is the largest model in the smallest schemes" in told
    assert "sizes and schemes are weighed against each other" in told
    assert "shown is the least" not in told
    low, high = plan.bytes_range or (0, 0)
    assert low < weights_of(idle)
    assert high == budget
    report = run(asked, idle, tmp_path / "idle")
    settled = load(tmp_path / "idle" / "recipe.yaml")
    assert settled.edits[0].config.sizes.ffn == 32
    assert {x.scheme.bits for x in settled.stages} == {8}
    assert weights_of(tmp_path / "idle") <= budget
    (best,) = [x for x in report.stages[0].candidates if x.place]
    assert best.measure == "bytes"
    assert best.takes <= budget
    four = of_four_bits(tiny("llama", **SMALL), tmp_path / "four")
    run(asked, four, tmp_path / "out")
    settled = load(tmp_path / "out" / "recipe.yaml")
    assert settled.edits[0].config.sizes.ffn is None
    assert 4 in {x.scheme.bits for x in settled.stages}
    assert weights_of(tmp_path / "out") <= budget


@pytest.mark.parametrize(
    ("family", "fmt"),
    [
        ("llama", "auto"),
        ("gpt2", "gptq"),
        pytest.param("mixtral", "gptq", marks=pytest.mark.long),
        pytest.param("phi3", "auto", marks=pytest.mark.long),
    ],
)
def test_what_sizes_take_is_counted_before(tiny, family: str, fmt: str) -> None:
    """A little more than what comes out with the smallest schemes, at every size."""
    source, output = tiny(family), {"format": fmt}
    rounded = {"method": "rtn", "candidates": [{"bits": b, "group_size": 16} for b in (8, 4)]}
    asked = recipe(prune(0.9, multiple_of=16), rounded, calibration=SELF, output=output)
    outline = make_plan(asked, source).source
    space = space_of(asked, outline, outline, asked.edits[0].config)
    assert space.shared
    assert len(space.points) > 1
    for point in {space.points[0], space.points[-1]}:
        sizes = replace(asked.edits[0].config, budget=None, sizes=space.sizes(point, None))
        edits = (replace(asked.edits[0], config=sizes),)
        smallest = replace(asked.stages[0], scheme=asked.stages[0].candidates[1])
        plain = replace(smallest, candidates=(), target=None, sensitivity="output_error")
        plan = make_plan(replace(asked, edits=edits, stages=(plain,)), source)
        exact, tensors = plan.shards.total_bytes, len(plan.shards.tensors)
        assert exact <= least_bytes(asked, plan.rounded) <= exact + 8 * tensors + 8
        assert exact <= space.takes(point) <= exact + 8 * tensors + 1000


def test_losses_by_another_teacher_are_kept_for_nobody(tiny) -> None:
    """Its folder may have other weights by then."""
    source, other = Checkpoint.open(tiny("llama", **SMALL)), str(tiny("llama"))
    train = {"method": "distill", "tokens": 64, "scope": "model"}
    for stage, is_kept in ((train, True), ({**train, "teacher": other}, False)):
        asked = recipe(stage, prune(20_000), calibration=SELF)
        known = costs.known_costs(asked, asked.edits[1], source, ("cpu", "fp32"))
        assert (known.path is not None) == is_kept


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([ROUND], "stages[0].target: is missing; give {bits_per_weight: 4.25} or {bytes: 4GB}, or"),
        ([prune(0.5) | {"budget": {"params": 0.5}}, ROUND], "stages[1].target: is missing"),
        ([prune(0.5), ROUND | {"sensitivity": "output_error"}], "stages[1].sensitivity: is output"),
        (
            [prune(0.5), ROUND | {"targets": ["*mlp*"]}, copy.deepcopy(ROUND)],
            "stages[2].candidates: stages[1] shares the bytes of prune",
        ),
        ([prune(0.5), ROUND | {"target": {"of": "prune", "bytes": 5}}], "of is prune, whose bytes"),
    ],
)
def test_what_nothing_shares_is_refused(stages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(*stages, calibration=SELF)
    assert message in str(caught.value)


def test_the_least_that_can_be_is_named(tiny) -> None:
    with pytest.raises(RecipeError, match="the least is"):
        make_plan(recipe(prune(20_000), ROUND, calibration=SELF), tiny("llama", **SMALL))


@pytest.mark.long
@killed_at(37, 50)
def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    tiny, tmp_path: Path, first: int, step: int
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "cache").touch()  # nothing can be kept there: all runs measure alike
    data = text_source(tmp_path, samples=4, length=8)
    asked = recipe(prune(0.8), ROUND, calibration=data)
    killed = kill_at_each_fifth(asked, tiny("llama", **SMALL), tmp_path / "runs", first, step)
    assert killed.total()
