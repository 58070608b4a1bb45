"""Passes of a run: planned on each other, each on the model that the one before it wrote.

The third edit is the tests' own: it cuts the FFN channels of every layer, as pruning will.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress.checkpoint import disk
from compress.checkpoint.outline import Outline
from compress.edits import EDITS
from compress.edits.edit import Edited, Part, Rows, row
from compress.errors import OutputError, RecipeError
from compress.inspect.inspect import inspect_checkpoint
from compress.passes.journal import PassJournal
from compress.report.html import render_html
from compress.report.terminal.table import render_table
from compress.runs import carry_out
from compress.runs.output import disk_space
from compress.verbs import RunOptions, make_plan, run
from helpers import faults
from helpers.in_transformers import logits
from helpers.short_runs import (
    GPTQ,
    RTN,
    go_on,
    kill_at_each_fifth,
    recipe,
    result_of,
    text_source,
)

BEHIND = (
    "stages[1]: cast changes the model itself, and stages[0] rounds its layers; put it in front"
)
UNTIE, CAST = {"method": "untie"}, {"method": "cast", "dtype": "fp16"}
TIED = {"tie_word_embeddings": True}


@dataclass(frozen=True, slots=True)
class CutConfig:
    """keep: FFN channels that stay."""

    keep: int


def _plan_cut(source: Outline, config: CutConfig) -> Edited:
    roles = {x.tensor: x.role for x in source.spec.linears()}
    cut = {"gate": 0, "up": 0, "down": 1}
    entries = []
    for name, info in source.tensors.items():
        shape = list(info.shape)
        if roles.get(name) in cut:
            shape[cut[roles[name]]] = config.keep
        entries.append((name, info.dtype, tuple(shape)))
    return Edited({**source.config, "intermediate_size": config.keep}, tuple(entries))


def _cut(part: Part, config: CutConfig) -> Iterator[Rows]:
    """The channels whose columns of `down` are largest stay, in their order."""
    weights = {name: part.whole(name) for name in part.names}
    linears = {} if part.block is None else {x.role: x.tensor for x in part.block.linears}
    if linears:
        energy = weights[linears["down"]].float().square().sum(0)
        kept = energy.topk(config.keep).indices.sort().values
        for role, axis in (("gate", 0), ("up", 0), ("down", 1)):
            name = linears[role]
            weights[name] = weights[name].index_select(axis, kept)
    yield from (Rows(name, 0, weight) for name, weight in weights.items())


def _held(source: Outline, config: CutConfig, run: int) -> int:
    return 2 * source.nbytes


@pytest.fixture
def _with_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    edits = MappingProxyType(
        {**EDITS, "cut": row(CutConfig, _plan_cut, _cut, _held, "cuts FFN channels")}
    )
    for place in ("edits", "plan.passes", "plan.search.splits", "passes.edit"):
        monkeypatch.setattr(f"compress.{place}.EDITS", edits)


def cut(keep: int) -> dict[str, Any]:
    return {"method": "cut", "keep": keep}


@pytest.mark.usefixtures("_with_cut")
def test_a_cut_model_loads_in_plain_transformers(tiny, tmp_path: Path) -> None:
    source = tiny("llama", dtype="fp32")
    texts = text_source(tmp_path)["sources"]
    report = run(recipe(cut(40), evaluation={"texts": texts}), source, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.intermediate_size == 40
    assert {x.mlp.up_proj.weight.shape for x in model.model.layers} == {(40, 64)}
    assert torch.isfinite(logits(model)).all()
    # What we measure of it is what transformers computes: 2 layers of 3 x 64 x 56 weights less.
    assert report.source.params - report.result.params == 2 * 3 * 64 * 56
    assert report.result.params == sum(p.numel() for p in model.parameters())
    assert report.quality is not None
    assert report.quality.texts[0].kl > 0
    assert "ffn 96" in report.source.architecture
    assert "ffn 40" in report.result.architecture
    page, table = render_html(report), render_table(report)
    assert "ffn 40" in page
    assert "Params" in page
    assert "Params    " in table
    assert "ffn 40" in " ".join(table.split())
    assert "ffn 40" in (tmp_path / "out" / "README.md").read_text()
    assert inspect_checkpoint(tmp_path / "out")["decoder"]["intermediate"] == 40


@pytest.mark.usefixtures("_with_cut")
def test_cutting_nothing_is_the_identity(tiny, tmp_path: Path) -> None:
    source = tiny("llama", dtype="fp32")
    run(recipe(cut(96)), source, tmp_path / "out")
    models = [AutoModelForCausalLM.from_pretrained(x) for x in (source, tmp_path / "out")]
    assert torch.equal(*map(logits, models))


@pytest.mark.usefixtures("_with_cut")
def test_later_stages_are_planned_on_what_edits_will_leave(tiny, tmp_path: Path) -> None:
    source = tiny("llama")
    with pytest.raises(RecipeError, match="down_proj has 40 input columns, not a multiple of 32"):
        make_plan(recipe(cut(40), RTN), source)
    plan = make_plan(recipe(cut(64), RTN), source)
    assert {m.linear.shape for m in plan.modules if m.linear.role == "down"} == {(64, 64)}
    out = tmp_path / "out"
    run(recipe(cut(64), RTN), source, out)
    assert sum(p.stat().st_size for p in out.glob("*.safetensors")) == plan.shards.total_bytes


@pytest.mark.parametrize("last", [RTN, GPTQ], ids=["stream", "calibrated"])
def test_one_run_is_its_passes_as_runs_of_their_own(
    tiny, tmp_path: Path, last: dict[str, Any]
) -> None:
    """Byte for byte; the folder of a stage is a checkpoint like any other."""
    source = tiny("llama", **TIED)
    data = {} if last is RTN else {"calibration": text_source(tmp_path)}
    whole = run(recipe(UNTIE, CAST, last, **data), source, tmp_path / "whole")
    run(recipe(UNTIE), source, tmp_path / "1")
    run(recipe(CAST), tmp_path / "1", tmp_path / "2")
    run(recipe(last, **data), tmp_path / "2", tmp_path / "3")
    mine, theirs = (result_of(tmp_path / name) for name in ("whole", "3"))
    for written in (mine, theirs):
        assert written.pop("README.md")
        assert written.pop("recipe.yaml")
    assert mine == theirs
    assert [stage.name for stage in whole.stages] == ["untie", "cast", "quantize"]
    assert all(stage.seconds > 0 for stage in whole.stages)


def test_stages_that_round_are_one_pass(tiny, tmp_path: Path) -> None:
    two = recipe({**RTN, "targets": ["*.mlp.*"]}, {**GPTQ, "targets": ["*.self_attn.*"]},
                 calibration=text_source(tmp_path))  # fmt: skip
    assert [each.name for each in make_plan(two, tiny("llama")).passes] == ["quantize"]
    assert [each.name for each in make_plan(recipe(CAST, RTN), tiny("llama")).passes] == [
        "stage.0",
        "quantize",
    ]


@pytest.mark.parametrize(("first", "step"), [pytest.param(1, 61, id="some"), *(
    pytest.param(i, 5, marks=pytest.mark.long) for i in range(5))])  # fmt: skip
def test_killed_in_any_pass_it_goes_on_to_the_same_bytes(
    tiny, tmp_path: Path, first: int, step: int
) -> None:
    asked = recipe(UNTIE, CAST, RTN, output={"shard_size": "100KB"})
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    killed = kill_at_each_fifth(asked, tiny("llama", **TIED, **small), tmp_path, first, step)
    assert killed.keys() >= {"pwrite", "fsync"}
    assert killed.total() > 100 / step


@pytest.mark.parametrize("asked", [
    pytest.param(recipe(CAST), id="one"),
    pytest.param(recipe(UNTIE, CAST), id="two", marks=pytest.mark.long),
])  # fmt: skip
def test_a_recipe_that_only_edits_goes_on_as_well(tiny, tmp_path: Path, asked: Any) -> None:
    source = tiny("llama", **TIED)
    assert kill_at_each_fifth(asked, source, tmp_path, 2, step=23).total() > 2


def killed_behind(source: Path, asked: Any, out: Path, made: str) -> None:
    """A run that was killed as soon as the folder of a stage was whole."""
    record, number = PassJournal.record, 0

    def noted(self: PassJournal, unit: str, data: Any) -> None:
        nonlocal number
        record(self, unit, data)
        if unit == "whole" and self is self.journal.passes.get(made):
            number = len(calls)

    with mock.patch.object(PassJournal, "record", noted), faults.counting() as calls:
        run(asked, source, out.with_name("whole"))
    with pytest.raises(faults.Killed), faults.fault_at(number, "before"):
        run(asked, source, out)
    held = json.loads((out.with_name("out.partial") / "journal.json").read_text())["passes"]
    assert "whole" in held[made]["units"]


def test_a_stage_that_changed_while_the_run_was_stopped_is_refused(tiny, tmp_path: Path) -> None:
    source, out, asked = tiny("llama"), tmp_path / "out", recipe(CAST, RTN)
    killed_behind(source, asked, out, "stage.0")
    weights = tmp_path / "out.partial" / "stage.0" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(OutputError) as caught:
        go_on(asked, source, out)
    assert str(caught.value) == (
        f"{weights.parent} was changed while the run was stopped; remove {tmp_path}/out.partial and"
        " start again"
    )


def test_an_input_of_ours_goes_once_its_successor_is_whole(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed, present = [], []

    def remove(path: Path, real: Any = disk.remove_tree) -> None:
        if path.name.startswith("stage."):
            removed.append(path.name)
            present.append(sorted(p.name for p in path.parent.glob("stage.*")))
        real(path)

    monkeypatch.setattr(disk, "remove_tree", remove)
    run(recipe(UNTIE, CAST, RTN), tiny("llama", **TIED), tmp_path / "out")
    assert removed == ["stage.0", "stage.1"]
    assert present == [["stage.0", "stage.1"], ["stage.1"]]
    assert not list((tmp_path / "out").glob("stage.*"))


def test_the_disk_must_hold_what_a_pass_reads_and_writes(tiny, tmp_path: Path) -> None:
    """The most of two models of ours at once: behind untie and while it is cast to 32 bits."""
    wide = {"method": "cast", "dtype": "fp32"}
    plan = make_plan(recipe(UNTIE, wide, RTN), tiny("llama", **TIED))
    first, second, last = (each.layout.total_bytes for each in plan.passes)
    space = disk_space(plan, tmp_path / "out.partial", torch.float32)
    assert space.result + space.between == max(first + second, second + last)
    assert (
        make_plan(recipe(RTN), tiny("llama")).passes[0].layout.total_bytes
        == last - (first - make_plan(recipe(RTN), tiny("llama", **TIED)).source_bytes)
        or last < second
    )


def test_memory_and_time_of_edits_are_in_the_plan(tiny) -> None:
    plan = make_plan(recipe(CAST, RTN), tiny("llama"))
    alone = make_plan(recipe(RTN), tiny("llama"))
    assert [need.part for need in plan.estimate.needs] == ["cast", "quantizing"]
    assert [need.part for need in alone.estimate.needs] == ["quantizing"]
    assert make_plan(recipe(CAST), tiny("llama")).estimate.seconds > 0


def test_the_memory_of_two_edits_of_one_name_is_that_of_the_larger(tiny) -> None:
    wide = {"method": "cast", "dtype": "fp32"}
    found = make_plan(recipe(wide, CAST, CAST), tiny("llama")).estimate
    assert [need.part for need in found.needs] == ["cast"] * 3
    assert found.needs[1].bytes > found.needs[2].bytes
    assert found.to_json()["parts"] == {"cast": found.peak_rss_bytes}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([RTN, CAST], BEHIND),
        ([{**CAST, "targets": ["*"]}], "stages[0].targets: unknown key 'targets'; allowed: method"),
        ([{"method": "cast", "dtype": "int8"}], "stages[0].dtype: "),
        ([{"method": "cast"}], "stages[0]: required key 'dtype' is missing"),
        ([{"method": "unite"}], "stages[0].method: unknown method 'unite'; allowed: "),
    ],
)  # fmt: skip
def test_mistakes_in_edits_are_one_line(stages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(*stages)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ({"output": {"format": "gptq"}}, "output.format: is gptq, and no stage rounds a layer"),
        ({"kv_cache": "fp8", "calibration": {"sources": "self"}}, "kv_cache: is 'fp8', whose"),
    ],
)
def test_what_needs_a_rounding_stage_is_refused(tiny, rest: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe(CAST, **rest), tiny("llama"))
    assert message in str(caught.value)


def test_a_finished_result_of_edits_is_published_by_resuming(tiny, tmp_path: Path) -> None:
    source, out, asked = tiny("llama"), tmp_path / "out", recipe(CAST)
    run(asked, source, out)
    out.rename(tmp_path / "out.publishing")
    report = run(asked, source, out, options=RunOptions(resume=True))
    assert report.result.format == "dense"
    assert out.is_dir()


def test_an_input_that_a_kill_left_goes_when_the_run_goes_on(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the end only: the check of the disk counts two models of ours at most."""
    source, out, asked = tiny("llama", **TIED), tmp_path / "out", recipe(UNTIE, CAST, RTN)
    killed_behind(source, asked, out, "stage.1")
    partial, present = tmp_path / "out.partial", []
    assert (partial / "stage.0").is_dir()

    def rounding(*given: Any, real: Any = carry_out._rounding) -> Any:
        present.extend(sorted(p.name for p in partial.glob("stage.*")))
        return real(*given)

    monkeypatch.setattr(carry_out, "_rounding", rounding)
    go_on(asked, source, out)
    assert present == ["stage.1"]


def test_bits_of_a_recipe_that_rounds_nothing_are_of_all_linears(tiny, tmp_path: Path) -> None:
    report = run(recipe({"method": "cast", "dtype": "fp32"}), tiny("llama"), tmp_path / "out")
    (line,) = [x for x in render_table(report).splitlines() if x.startswith("Bits per weight")]
    assert line.split() == ["Bits", "per", "weight", "16", "32", "linears"]
    assert "compressed linears" not in render_html(report)


def test_a_run_plans_its_edits_and_describes_its_models_once(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.checkpoint import outline

    seen = []

    def describe(config: Any, shapes: Any, real: Any = outline.describe) -> Any:
        seen.append(config["tie_word_embeddings"])
        return real(config, shapes)

    monkeypatch.setattr(outline, "describe", describe)
    run(recipe(UNTIE, CAST, RTN), tiny("llama", **TIED), tmp_path / "out")
    assert seen == [True, False, False]
