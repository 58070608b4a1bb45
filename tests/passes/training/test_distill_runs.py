"""Distillation as a stage: it mends what edits lost, never makes it worse, and survives kills."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compress.distill.memory import WALKED_STATES
from compress.errors import DataError, RecipeError
from compress.passes.training import whole
from compress.passes.training.setting import data_of
from compress.plan.memory_needs import memory_needs
from compress.proof import loads
from compress.report.html import render_html
from compress.report.schema import Report
from compress.report.terminal.table import render_table
from compress.verbs import RunOptions, make_plan, run
from helpers.short_runs import RTN, kill_at_each_fifth, killed_at, recipe, result_of, text_source

pytestmark = pytest.mark.usefixtures("answered_here")
CUT = {"method": "prune_width", "ffn": 24, "repair": "none"}
FEW = {"batch": 4, "every": 4, "length": 8}


def distill(tokens: int | str = 640, **options: Any) -> dict[str, Any]:
    return {"method": "distill", "tokens": tokens, **FEW, **options}


def held_out(report: Report) -> list[tuple[float, float]]:
    """Losses before and after each training."""
    return [(x.start, x.end) for stage in report.stages for x in stage.courses]


@pytest.mark.parametrize("options", [
    {"scope": "model"}, {"scope": "model", "train": "lora"},
    pytest.param({"scope": "block"}, marks=pytest.mark.long),
    {"scope": "model", "blocks": 1.0, "optimizer": "muon"},
    pytest.param({"scope": "model", "cache": 0}, marks=pytest.mark.long), pytest.param(
        {"scope": "model", "loss": "jsd", "ce": 0.1, "optimizer": "adafactor"},
        marks=pytest.mark.long),
], ids=["cached", "lora", "block", "outputs", "resident", "jsd"])  # fmt: skip
def test_what_was_cut_comes_nearer_to_the_source(
    tiny, tmp_path: Path, options: Mapping[str, Any]
) -> None:
    data = text_source(tmp_path)
    report = run(recipe(CUT, distill(**options), calibration=data), tiny("llama"), tmp_path / "out")
    losses = held_out(report)
    assert len(losses) == (2 if options["scope"] == "block" else 1)
    assert all(end <= start for start, end in losses)
    assert sum(end for _, end in losses) < 0.98 * sum(start for start, _ in losses)
    assert report.loads is not None
    assert report.loads.proof == "logits"
    assert "Trained" in render_table(report)
    assert "Held-out loss" in render_html(report)
    left = {p.name for p in (tmp_path / "out").iterdir()}
    assert not {x for x in left if x.startswith(("teacher", "training", "states"))}


@pytest.mark.parametrize("options", [{}, {"blocks": 1.0}], ids=["cached", "outputs"])
def test_a_training_that_is_over_is_not_done_again(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Mapping[str, Any]
) -> None:
    data = text_source(tmp_path)
    asked = recipe(CUT, distill(160, scope="model", **options), calibration=data)

    def killed(*args: Any, **rest: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(loads, "prove_load", killed)
        with pytest.raises(KeyboardInterrupt):
            run(asked, tiny("llama"), tmp_path / "out")
    monkeypatch.setattr(whole, "train", killed)
    run(asked, tiny("llama"), tmp_path / "out", options=RunOptions(resume=True))


def test_both_scopes_are_passes_of_their_own(tiny, tmp_path: Path) -> None:
    source, data = tiny("llama"), text_source(tmp_path)
    asked = recipe(CUT, distill(160), RTN | {"scheme": "W8A16", "group_size": 8}, calibration=data)
    plan = make_plan(asked, source)
    names = ["stage.0", "stage.1.block", "stage.1.model", "quantize"]
    assert [each.name for each in plan.passes] == names
    whole = run(asked, source, tmp_path / "whole")
    labels = ["prune_width", "distill block", "distill model", "quantize"]
    assert [stage.name for stage in whole.stages] == labels
    rounding = RTN | {"scheme": "W8A16", "group_size": 8}
    apart = (CUT, distill(160, scope="block"), distill(160, scope="model"), rounding)
    run(recipe(*apart, calibration=data), source, tmp_path / "apart")
    mine, theirs = (result_of(tmp_path / name) for name in ("whole", "apart"))
    assert mine["model.safetensors"] == theirs["model.safetensors"]


def test_a_block_that_no_edit_has_reached_is_left(tiny, tmp_path: Path) -> None:
    """In front of a gap: no step is taken, and no bit of it changes."""
    source = tiny("llama", num_hidden_layers=4)
    cut = {"method": "prune_depth", "keep": [0, 1, 3], "repair": "none"}
    asked = recipe(cut, distill(scope="block"), calibration=text_source(tmp_path))
    first, *others = run(asked, source, tmp_path / "out").stages[1].courses
    assert (first.start, first.steps) == (0, (0,))
    assert first.ended == "nothing to learn: it gives what its teacher gives"
    assert all(course.start > 0 and course.steps[-1] > 0 for course in others)
    before, after = (load_file(x / "model.safetensors") for x in (source, tmp_path / "out"))
    names = [name for name in before if ".layers.0." in name]
    assert all(torch.equal(before[name], after[name]) for name in names)


def test_blocks_that_are_computed_again_learn_the_same(tiny, tmp_path: Path) -> None:
    """To the bit, with less memory. Outputs are compared behind the gap that a block fills."""
    source, data = tiny("llama", num_hidden_layers=3), text_source(tmp_path)
    cut, found, most = {"method": "prune_depth", "keep": [0, 2]}, [], []
    for recompute in (False, True):
        stage = distill(160, scope="model", blocks=0.5, recompute=recompute)
        asked, out = recipe(cut, stage, calibration=data), tmp_path / str(recompute)
        most.append(make_plan(asked, source).run_size.edits[-1].bytes)
        run(asked, source, out)
        found.append((out / "model.safetensors").read_bytes())
    assert found[0] == found[1]
    assert most[1] < most[0]


def test_outputs_of_blocks_that_cannot_be_compared_are_refused(tiny, tmp_path: Path) -> None:
    narrow = {"method": "prune_hidden", "hidden": 48}
    asked = recipe(narrow, distill(scope="model", blocks=1), calibration=text_source(tmp_path))
    with pytest.raises(RecipeError, match="and the student another; blocks compares"):
        make_plan(asked, tiny("llama"))


def test_only_what_edits_changed_is_trained(tiny, tmp_path: Path) -> None:
    source, data = tiny("llama"), text_source(tmp_path)
    run(recipe(CUT, calibration=data), source, tmp_path / "cut")
    asked = recipe(CUT, distill(scope="model", train="changed"), calibration=data)
    run(asked, source, tmp_path / "out")
    cut, out = (load_file(tmp_path / x / "model.safetensors") for x in ("cut", "out"))
    moved = {name for name in cut if not torch.equal(cut[name], out[name])}
    assert moved
    assert all(".mlp." in name for name in moved)


def test_a_stage_may_have_texts_of_its_own(tiny, tmp_path: Path) -> None:
    sources = text_source(tmp_path)["sources"]
    cast = {"method": "cast", "dtype": "fp32"}
    asked = recipe(cast, distill(64, scope="model", sources=sources))
    report = run(asked, tiny("llama"), tmp_path / "out")
    # The source itself is not to be mended.
    assert held_out(report)[0][1] == held_out(report)[0][0]


@pytest.mark.long
@killed_at(500, 999)
def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    tiny, tmp_path: Path, first: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.passes.training.whole.SAVED_EVERY", 0.0)
    (tmp_path / "runs").mkdir()
    asked = recipe(CUT, distill(96), calibration=text_source(tmp_path, samples=2, length=8))
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    killed = kill_at_each_fifth(asked, tiny("llama", **small), tmp_path / "runs", first, step)
    assert killed.total()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens is 0; it is 1 or more"),
        ({"tokens": "3 many"}, "tokens: is '3 many'; it takes a whole number"),
        ({"scope": ["model", "block"]}, "it takes block, model, or [block, model]"),
        ({"ce": 2}, "ce is 2; it is a share, 0 to 1"),
        ({"rate": 0}, "rate is 0; it is above 0"),
        ({"targets": ["*"]}, "unknown key 'targets'"),
        ({"scope": "block", "loss": "jsd"}, "loss is jsd, which is of scope model"),
        ({"scope": "block", "recompute": True}, "recompute is True, which is of scope model"),
        ({"scope": "block", "train": "lora"}, "train is lora, which is of scope model"),
        ({"scope": "block", "train": "changed"}, "train is changed, which is of scope model"),
        ({"rank": 8}, "rank is 8, that of adapters; set train: lora too"),
        ({"blocks": 1, "cache": 8}, "cache is 8, and with blocks the teacher is in memory"),
        ({"train": "changed"}, "train: is changed, and no edit stands before it"),
    ],
)
def test_what_cannot_be_trained_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe({**distill(), **options}, calibration={"sources": "self"})
    assert message in str(caught.value)


def test_evaluation_text_is_no_text_to_train_on(tmp_path: Path) -> None:
    data = text_source(tmp_path)
    with pytest.raises(RecipeError, match="is also evaluated on"):
        recipe(distill(), calibration=data, evaluation={"texts": text_source(tmp_path)["sources"]})
    link = tmp_path / "link.txt"
    link.symlink_to(tmp_path / "words.txt")
    with pytest.raises(RecipeError, match="is also evaluated on"):
        recipe(distill(), calibration=data, evaluation={"texts": [{"text": str(link)}]})
    own = distill(sources=[{"kind": "self"}])
    with pytest.raises(RecipeError, match="text of its own by seed 0, which is also evaluated on"):
        recipe(own, evaluation={"texts": [{"self": True, "seed": 0}]})
    assert recipe(own, evaluation={"texts": [{"self": True, "seed": 1}]})


def test_rows_of_another_length_begin_behind_the_calibration() -> None:
    calibration = {"sources": "self", "samples": 5, "length": 24}
    for length, behind in ((24, 5), (16, 8), (48, 3)):  # of 120 tokens
        asked = recipe(distill(96, length=length), calibration=calibration)
        data, skip = data_of(asked, asked.edits[0].config, 0)
        assert (skip, data.samples) == (behind, behind + 96 // length)


def test_a_training_that_does_not_fit_is_told_what_would(tiny, tmp_path: Path) -> None:
    source = tiny("llama", intermediate_size=512, num_hidden_layers=24)
    stage, cut = distill("100k", scope="model", length=100, batch=8), {**CUT, "ffn": 500}
    asked = recipe(cut, stage, calibration=text_source(tmp_path))
    run_size = make_plan(asked, source).run_size
    ways = dict(run_size.edits[-1].otherwise)
    changed, lora, shared = (f"stages[1].{x}" for x in ("train=changed", "train=lora", "recompute"))
    # Query, key and value, norms, embedding and head are as they were.
    assert ways[f"--set {lora}"] < ways[f"--set {changed}"] < run_size.edits[-1].bytes
    # Of another machine, on which this process holds nothing yet.
    whole = max(need.bytes for need in memory_needs(run_size))
    (problem,) = make_plan(asked, source, memory=int(0.8 * whole)).problems
    assert f"what would fit: --set {shared}=true (" in problem
    assert re.search(r", or --set stages\[1\].scope=block \(\d+ MB\)", problem)
    (problem,) = make_plan(asked, source, memory=int(0.4 * whole)).problems
    assert "no option of the training fits; the least take --set " in problem
    # Nothing changed before it: there is no such way, and a recipe cannot ask for it.
    alone = make_plan(recipe(stage, calibration=text_source(tmp_path)), source).run_size.edits[-1]
    assert not any("changed" in words for words, _ in alone.otherwise)
    cast = {"method": "cast", "dtype": "fp32"}
    asked = recipe(cast, {**stage, "train": "changed"}, calibration=text_source(tmp_path))
    assert any(
        "and no edit changes a tensor before it" in x for x in make_plan(asked, source).problems
    )


def test_more_text_is_no_more_memory_than_a_batch_of_it(tiny, tmp_path: Path) -> None:
    """What a training walks over goes through a block in batches; its states lie in a file."""
    data, few, many = text_source(tmp_path), 100_000, 100_000_000
    for scope in ("block", "model"):
        need = [
            make_plan(recipe(distill(x, scope=scope), calibration=data), tiny("llama"))
            .run_size.edits[0].bytes
            for x in (few, many)
        ]  # fmt: skip
        assert need[1] - need[0] <= WALKED_STATES


def test_too_little_text_is_told_with_what_there_is(tiny, tmp_path: Path) -> None:
    data = text_source(tmp_path, samples=27, length=16)
    with pytest.raises(DataError, match=r"27 of them are the calibration's: name sources of its"):
        run(recipe(distill(length=16), calibration=data), tiny("llama"), tmp_path / "out")


@pytest.mark.parametrize(("text", "count"), [("3M", 3_000_000), ("300k", 300_000), ("1.5k", 1500)])
def test_tokens_may_have_a_letter(text: str, count: int) -> None:
    (edit,) = recipe(distill(text), calibration={"sources": "self"}).edits
    assert edit.config.tokens == count
