"""A narrower residual stream as a user asks for it: stock classes load it, all that read and write
the stream are mended, later stages know its basis, and kills cost nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compress.errors import CheckpointError, OutputError, RecipeError
from compress.passes.structure import identity, learned
from compress.passes.structure.files import WORKING, basis_path
from compress.plan.plan import Plan
from compress.verbs import RunOptions, make_plan, run
from helpers.in_transformers import lost
from helpers.short_runs import SELF, WORDS, kill_at_each_fifth, killed_at, recipe, text_source

pytestmark = pytest.mark.usefixtures("answered_here")
TEXT = WORDS * 5
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 16}


def width(**options: Any) -> dict[str, Any]:
    return {"method": "prune_width", **options}


def narrowed(folder: Path, source: Path, **options: Any) -> float:
    """What a narrower stream loses."""
    out = folder / "-".join(f"{key}.{value}" for key, value in options.items())
    stage = {"method": "prune_hidden", **options}
    asked = recipe(stage, calibration=text_source(folder, samples=24))
    report = run(asked, source, out)
    assert report.result.bytes == make_plan(asked, source).shards.total_bytes
    assert report.loads is not None
    assert report.loads.proof == "logits"
    return lost(out, source, TEXT)


def test_directions_lose_less_than_channels_and_repair_brings_both_closer(
    tiny, tmp_path: Path
) -> None:
    source = tiny("llama", dtype="fp32")
    found = {
        (basis, repair): narrowed(tmp_path, source, hidden=48, basis=basis, repair=repair)
        for basis, repair in (("pca", "none"), ("pca", "drift"), ("channels", "drift"))
    }
    assert found["pca", "drift"] < 0.8 * found["pca", "none"]
    assert found["pca", "drift"] < 0.8 * found["channels", "drift"]


@pytest.mark.parametrize(
    "family", [*(pytest.param(x, marks=pytest.mark.long) for x in ("gemma2", "olmo2")), "qwen3_moe"]
)
def test_channels_go_where_norms_do_not_turn_and_readers_of_experts_are_mended(
    tiny, tmp_path: Path, family: str
) -> None:
    source = tiny(family, dtype="fp32")
    kept = [narrowed(tmp_path, source, hidden=48, repair=x) for x in ("none", "drift")]
    assert kept[1] < 0.8 * kept[0]


@pytest.mark.long
def test_a_head_that_is_the_embedding_stays_it_or_gets_weights_of_its_own(
    tiny, tmp_path: Path
) -> None:
    source = tiny("llama", dtype="fp32", tied=True)
    shared = narrowed(tmp_path, source, hidden=48)
    apart = narrowed(tmp_path, source, hidden=48, head="own")
    rotated = narrowed(tmp_path, source, hidden=48, repair="none")
    assert apart < shared < rotated
    for name, tied in (("hidden.48", True), ("hidden.48-head.own", False)):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["tie_word_embeddings"] is tied
        assert ("lm_head.weight" in load_file(tmp_path / name / "model.safetensors")) is not tied


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_a_share_of_1_changes_no_bit(tiny, tmp_path: Path, family: str) -> None:
    source = tiny(family)
    run(recipe(width(hidden=1.0), calibration=text_source(tmp_path)), source, tmp_path / "out")
    before, after = (load_file(x / "model.safetensors") for x in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.long
def test_later_stages_bring_the_source_into_the_basis(tiny, tmp_path: Path) -> None:
    """A refit behind a narrower stream, and a second narrowing, still mend against the source."""
    source = tiny("llama", num_hidden_layers=3, dtype="fp32")
    data = text_source(tmp_path, samples=24)
    first = width(ffn=80, hidden=56, repair="none")
    stages: dict[str, list[dict[str, Any]]] = {
        "plain": [],
        "refitted": [width(ffn=80)],
        "again": [{"method": "prune_depth", "keep": [0, 1, 2]}, width(hidden=55)],
    }
    for name, more in stages.items():
        run(recipe(first, *more, calibration=data), source, tmp_path / name)
    plain = lost(tmp_path / "plain", source, TEXT)
    assert lost(tmp_path / "refitted", source, TEXT) < 0.9 * plain
    again = lost(tmp_path / "again", source, TEXT)
    assert again < 0.9 * plain


@pytest.mark.long
def test_blocks_are_trained_towards_the_source_in_the_basis(tiny, tmp_path: Path) -> None:
    source, data = tiny("llama", dtype="fp32"), text_source(tmp_path, samples=24)
    first = {"method": "prune_hidden", "hidden": 48, "repair": "none"}
    train = {"method": "distill", "tokens": 1536, "scope": ["block"], "rate": 0.003, "every": 2}
    for name, more in {"cut": [], "trained": [train]}.items():
        run(recipe(first, *more, calibration=data), source, tmp_path / name)
    assert lost(tmp_path / "trained", source, TEXT) < lost(tmp_path / "cut", source, TEXT)


def test_a_stage_that_cuts_blocks_too_is_two_passes(tiny) -> None:
    """The stream last, as its basis is found by what the first leaves; later passes know it."""
    asked = recipe(width(ffn=80, hidden=56), width(ffn=64), calibration=SELF)
    plan = make_plan(asked, tiny("llama"))
    passes = {"stage.0": "prune_width", "stage.0.hidden": "prune_hidden", "stage.1": "prune_width"}
    assert {each.name: each.label for each in plan.edits} == passes
    assert [each.narrowed for each in plan.edits] == [(), (), ("stage.0.hidden",)]
    assert (plan.result.spec.hidden, plan.result.spec.intermediate) == (56, 64)


def test_a_rotation_that_is_not_exact_stops_the_run(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned = identity.turned

    def bent(block: Any, read: Any, turn: Any) -> Any:
        tensors = turned(block, read, turn)
        return {n: 1.01 * x if n.endswith("o_proj.weight") else x for n, x in tensors.items()}

    monkeypatch.setattr(identity, "turned", bent)
    asked = recipe(width(hidden=48, repair="none"), calibration=text_source(tmp_path))
    with pytest.raises(CheckpointError, match="at zero compression the stage changes"):
        run(asked, tiny("llama"), tmp_path / "out")


def test_a_basis_that_was_changed_is_refused(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipe(width(hidden=48), calibration=text_source(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(learned, "remove_states", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(asked, tiny("llama"), tmp_path / "out")
    journal = tmp_path / "out.partial" / "journal.json"
    held = json.loads(journal.read_text())
    del held["passes"]["stage.0.hidden"]["units"]["head"]
    journal.write_text(json.dumps(held))
    path = basis_path(tmp_path / "out.partial" / WORKING, "stage.0.hidden")
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(OutputError, match="was changed while the run was stopped"):
        run(asked, tiny("llama"), tmp_path / "out", options=RunOptions(resume=True))


def _interrupt(folder: Path) -> None:
    raise KeyboardInterrupt


@pytest.mark.long
@killed_at(200, 400)
def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    tiny, tmp_path: Path, first: int, step: int
) -> None:
    (tmp_path / "runs").mkdir()
    asked = recipe(
        width(hidden=16), {"method": "prune_depth", "keep": [0]},
        calibration=text_source(tmp_path, samples=2, length=8),
    )  # fmt: skip
    source = tiny("mistral", **SMALL)
    assert kill_at_each_fifth(asked, source, tmp_path / "runs", first, step)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"hidden": 0}, "is 0; 1 or more must stay"),
        ("llama", {"hidden": 65}, "stages[0].hidden: is 65; the source has 64"),
        ("llama", {"ffn": 8, "basis": "pca"}, "basis is that of hidden, which is missing"),
        ("gemma2", {"hidden": 48, "basis": "pca"}, "take basis channels"),
        ("gemma2", {"hidden": 50}, "gemma2 takes no hidden 50 with 4 heads"),
        ("gpt2", {"hidden": 48}, "a prune_width with both cuts them together"),
    ],
)
def test_what_cannot_stay_is_refused_before_work(
    tiny, family: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((RecipeError, CheckpointError)) as caught:
        make_plan(recipe(width(**options), calibration=SELF), tiny(family))
    assert message in str(caught.value)


def test_a_head_cannot_be_parted_twice(tiny) -> None:
    stage = {"method": "prune_hidden", "hidden": 48, "head": "own"}
    with pytest.raises(CheckpointError, match=r"head: is own, and the model has one"):
        make_plan(recipe(stage, calibration=SELF), tiny("llama"))


def test_the_plan_of_a_parted_head_names_the_width_of_its_bytes(tiny) -> None:
    source = tiny("qwen3", tied=True, num_hidden_layers=6)

    def plan_of(hidden: int, **options: Any) -> Plan:
        stage = {"method": "prune_hidden", "hidden": hidden, **options}
        return make_plan(recipe(stage, calibration=SELF), source)

    parted = plan_of(40, head="own")
    (line,) = (x for x in parted.notes if "head of its own" in x)
    wide = int(line.partition("the bytes of hidden ")[2].partition(" ")[0])
    same, more = (plan_of(hidden).model.rounded.nbytes for hidden in (wide, wide + 1))
    assert same <= parted.model.rounded.nbytes < more
    (line,) = (x for x in plan_of(63, head="own").notes if "head of its own" in x)
    assert line.endswith("hidden 63 takes no less than hidden 64, all of it")
    assert not any("head of its own" in x for x in plan_of(40).notes)
