"""A training of the rounding itself: codes move by one at most, by weights as they were."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compress.checkpoint import Checkpoint
from compress.errors import RecipeError
from compress.formats import open_weights
from compress.passes.training import blocks
from compress.quant.tensor import QuantizedTensor
from compress.runs.output import disk_space
from compress.verbs import RunOptions, make_plan, run
from helpers.short_runs import kill_at_each_fifth, killed_at, recipe, text_source

pytestmark = pytest.mark.usefixtures("answered_here")
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
RTN = {"method": "rtn", "scheme": "W4A16", "group_size": 16}
ASYM = {"method": "rtn", "scheme": {"bits": 3, "symmetric": False, "group_size": 16}}
AWQ = {"method": "rtn", "scheme": "W4A16_ASYM", "group_size": 32}
EIGHT = {"method": "rtn", "scheme": {"bits": 8, "group_size": 16}}
ORDERED = RTN | {"method": "gptq", "act_order": "group"}
CUT = {"method": "prune_width", "ffn": 0.5}
RUNS = [
    ("llama", "compressed-tensors", ASYM),
    ("gpt2", "gptq", RTN),
    ("llama", "gptq", ORDERED),
    ("llama", "gptq_v2", RTN),
    ("llama", "compressed-tensors", EIGHT),
    ("llama", "awq", AWQ),
    ("mixtral", "compressed-tensors", RTN),
]


class KilledError(Exception):
    pass


def tune(tokens: int = 320, **options: Any) -> dict[str, Any]:
    few = {"batch": 4, "every": 5, "length": 8, "samples": 16, "scope": "block"}
    return {
        "method": "distill", "tokens": tokens, "train": ["rounding", "scales"], **few, **options
    }  # fmt: skip


@pytest.mark.parametrize(
    ("family", "fmt", "rounding"),
    [
        pytest.param(*each, marks=[] if i < 2 else pytest.mark.long, id=f"{each[0]}-{each[1]}-{i}")
        for i, each in enumerate(RUNS)
    ],
)
def test_codes_move_by_one_and_lose_less(
    tiny, tmp_path: Path, family: str, fmt: str, rounding: Mapping[str, Any]
) -> None:
    source, data = tiny(family, dtype="fp32"), text_source(tmp_path)
    rest = {"output": {"format": fmt}}
    alone = rest | ({"calibration": data} if rounding["method"] == "gptq" else {})
    run(recipe(rounding, **alone), source, tmp_path / "rounded")
    # With a tenth of the text GPTQ's codes are the best there are.
    trained = tune(2000, batch=8, every=25, samples=250)
    report = run(recipe(rounding, trained, calibration=data, **rest), source, tmp_path / "out")
    courses = [x for stage in report.stages for x in stage.courses]
    assert sum(x.end for x in courses) < sum(x.start for x in courses)
    assert any("of the codes moved" in x.ended for x in courses)
    before, after = (open_weights(Checkpoint.open(tmp_path / x)) for x in ("rounded", "out"))
    moved = 0
    for linear in before.spec.linears():
        one, other = before.quantized(linear.tensor), after.quantized(linear.tensor)
        if one is None or other is None:
            continue
        away = other.codes.int() - one.codes.int()
        moved += int(away.abs().sum())
        assert away.abs().max() <= 1
        assert one.zero is other.zero is None or torch.equal(one.zero, other.zero)
    assert moved
    first, second = (load_file(tmp_path / x / "model.safetensors") for x in ("rounded", "out"))
    assert first.keys() == second.keys()
    plain = [name for name in first if name.endswith(("norm.weight", "embed_tokens.weight"))]
    assert all(torch.equal(first[name], second[name]) for name in plain)


def test_weights_before_rounding_are_those_that_the_edits_leave(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut and all behind it in one run, killed in between, give the bytes of a run on what the
    cut has left, taught by the same model."""
    source, data = tiny("llama", **SMALL), text_source(tmp_path)
    whole = recipe(CUT, RTN, tune(), calibration=data)
    plan = make_plan(whole, source)
    space = disk_space(plan, tmp_path / "out.partial", torch.float32)
    first, second, third = (each.layout.total_bytes for each in plan.passes)
    assert space.result + space.between == first + second + third
    really = blocks.train

    def killed(scope: Any, *rest: Any, **options: Any) -> Any:
        if scope.block.spec.index:
            raise KilledError
        return really(scope, *rest, **options)

    monkeypatch.setattr(blocks, "train", killed)
    with pytest.raises(KilledError):
        run(whole, source, tmp_path / "out")
    monkeypatch.setattr(blocks, "train", really)
    assert (tmp_path / "out.partial" / "stage.0").is_dir()
    run(whole, source, tmp_path / "out", options=RunOptions(resume=True))
    run(recipe(CUT, calibration=data), source, tmp_path / "cut")
    rest = recipe(RTN, tune(teacher=str(source)), calibration=data)
    run(rest, tmp_path / "cut", tmp_path / "other")
    one, other = ((tmp_path / x / "model.safetensors").read_bytes() for x in ("out", "other"))
    assert one == other
    assert not list((tmp_path / "out").glob("stage.*"))


def test_codes_that_gained_nothing_are_as_they_were(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, data, really = tiny("llama", **SMALL), text_source(tmp_path), blocks.train
    moved = list[bool]()

    def worse(scope: Any, *rest: Any, **options: Any) -> Any:
        found = really(scope, *rest, **options)
        moved.append(any(isinstance(x, QuantizedTensor) for x in found.weights.values()))
        return replace(found, weights={})

    monkeypatch.setattr(blocks, "train", worse)
    run(recipe(RTN), source, tmp_path / "rounded")
    run(recipe(RTN, tune(), calibration=data), source, tmp_path / "out")
    assert any(moved)
    one, other = ((tmp_path / x / "model.safetensors").read_bytes() for x in ("rounded", "out"))
    assert one == other


@pytest.mark.long
@killed_at(500, 999)
def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    tiny, tmp_path: Path, first: int, step: int
) -> None:
    (tmp_path / "runs").mkdir()
    data = text_source(tmp_path, samples=2, length=8)
    asked = recipe(CUT, RTN, tune(96, samples=8), calibration=data)
    killed = kill_at_each_fifth(asked, tiny("llama", **SMALL), tmp_path / "runs", first, step)
    assert killed.total()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "model"}, "scope is [model], and rounding is trained block by block; set"),
        ({"train": "rounding", "scope": ["block", "model"]}, "scope is [block, model], and"),
        ({"train": ["rounding", "all"]}, "behind stages that round some of rounding, scales and"),
        ({"samples": 1}, "samples is 1; training takes 2 rows or more"),
        ({"optimizer": "adafactor"}, "optimizer is adafactor, whose steps are shares of what it"),
        ({"train": "rounding", "rate": 1e-3}, "rate is 0.001, and train is rounding alone"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(RTN, tune(**options), calibration={"sources": "self"})
    assert message in str(caught.value)


def test_who_teaches_is_held_to_what_that_takes(tiny) -> None:
    other = tiny("llama", hidden_size=32)
    asked = recipe(RTN, tune(teacher=str(other)), calibration={"sources": "self"})
    with pytest.raises(RecipeError) as caught:
        make_plan(asked, tiny("llama"))
    assert "stages[1].teacher" in str(caught.value)
    assert "hidden" in str(caught.value)


def test_weights_that_are_scaled_before_they_are_rounded_are_refused(tiny) -> None:
    awq = {"method": "awq", "scheme": "W4A16_ASYM", "group_size": 32}
    asked = recipe(awq, tune(), calibration={"sources": "self"})
    with pytest.raises(RecipeError) as caught:
        make_plan(asked, tiny("llama"))
    assert "stages[1].train: rounding is trained from the weights as" in str(caught.value)


def test_the_model_is_trained_on_scales_behind_the_blocks(tiny) -> None:
    both = tune(scope=["block", "model"])
    plan = make_plan(recipe(RTN, both, calibration={"sources": "self"}), tiny("llama"))
    found = [each.stage.config.train for each in plan.passes if each.stage is not None]
    assert found == [("rounding", "scales"), ("scales",)]
    assert [each.moves_codes for each in plan.passes] == [False, True, False]
