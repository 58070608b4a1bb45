"""Heads and the residual stream cut together, in families whose class ties one to the other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compress.errors import CheckpointError
from compress.verbs import make_plan, run
from helpers.in_transformers import load, lost
from helpers.short_runs import SELF, WORDS, kill_at_each_fifth, killed_at, recipe, text_source

pytestmark = pytest.mark.usefixtures("answered_here")
TEXT = WORDS * 5
TIED = {"gpt2": "GPT2LMHeadModel", "gpt_neox": "GPTNeoXForCausalLM", "opt": "OPTForCausalLM"}
OTHERS = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "cwm": "CwmForCausalLM",
}
QUICK = ("gpt2",)
FAMILIES = [
    pytest.param(family, name, marks=() if family in QUICK else pytest.mark.long)
    for family, name in {**TIED, **OTHERS}.items()
]
BOTH = {"method": "prune_width", "heads": 3, "hidden": 48}


def made(tiny: Any, family: str, **options: Any) -> Path:
    groups = {} if family in TIED else {"num_key_value_heads": 4}
    found: Path = tiny(family, **groups, **options)
    return found


@pytest.mark.parametrize(("family", "name"), FAMILIES)
def test_both_are_cut_at_once_and_the_family_keeps_its_class(
    tiny, tmp_path: Path, family: str, name: str
) -> None:
    source = made(tiny, family, dtype="fp32")
    data, losses = text_source(tmp_path, samples=24), {}
    for repair in ("none", "drift"):
        asked = recipe({**BOTH, "ffn": 0.75, "repair": repair}, calibration=data)
        report = run(asked, source, tmp_path / repair)
        plan = make_plan(asked, source)
        assert report.result.bytes == plan.shards.total_bytes
        assert report.loads is not None
        assert (report.loads.model_class, report.loads.proof) == (name, "logits")
        losses[repair] = lost(tmp_path / repair, source, TEXT)
    assert losses["drift"] < losses["none"]
    model = load(tmp_path / "drift")
    assert (model.config.hidden_size, model.config.num_attention_heads) == (48, 3)
    before, after = (
        json.loads((x / "config.json").read_text()) for x in (source, tmp_path / "drift")
    )
    assert after.keys() - {"dtype", "torch_dtype"} <= before.keys() | {"num_key_value_heads"}


def test_a_share_of_1_changes_no_bit(tiny, tmp_path: Path) -> None:
    source = tiny("gpt2")
    stage = {"method": "prune_width", "heads": 1.0, "hidden": 1.0}
    run(recipe(stage, calibration=text_source(tmp_path)), source, tmp_path / "out")
    before, after = (load_file(x / "model.safetensors") for x in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_llama_that_takes_both_stays_a_llama(tiny) -> None:
    """Where one alone would make it a mistral."""
    source = made(tiny, "llama")
    plan = make_plan(recipe(BOTH, calibration=SELF), source)
    assert plan.result.spec.model_type == "llama"
    alone = make_plan(recipe({"method": "prune_width", "heads": 3}, calibration=SELF), source)
    assert alone.result.spec.model_type == "mistral"
    apart = make_plan(recipe({**BOTH, "hidden": 50}, calibration=SELF), source)
    assert apart.result.spec.model_type == "mistral"


@pytest.mark.parametrize(
    ("stages", "line"),
    [
        ([{**BOTH, "hidden": 50}], "gpt2 takes no hidden 50 with 3 heads"),
        ([{**BOTH, "hidden": 0.5}], "2 heads fit hidden 32, and hidden 48 fits 3 heads"),
        (
            [{"method": "prune_width", "heads": 3}, {"method": "prune_hidden", "hidden": 48}],
            "hidden 48 fits 3 heads; a prune_width with both cuts them together",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_before_work(
    tiny, stages: list[dict[str, Any]], line: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        make_plan(recipe(*stages, calibration=SELF), tiny("gpt2"))
    assert line in str(caught.value)


@pytest.mark.long
@killed_at(200, 400)
def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    tiny, tmp_path: Path, first: int, step: int
) -> None:
    (tmp_path / "runs").mkdir()
    asked = recipe(
        {"method": "prune_width", "heads": 1, "hidden": 16},
        calibration=text_source(tmp_path, samples=2, length=8),
    )
    source = tiny("gpt2", n_embd=32, n_head=2, n_inner=32)
    assert kill_at_each_fifth(asked, source, tmp_path / "runs", first, step)
