"""Keys and values that become one latent, as a user asks for it: nothing is lost where all stays,
stock transformers loads the rest, and what is cached is what was asked for."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from compress.arch.describe import describe
from compress.checkpoint import Checkpoint
from compress.checkpoint.outline import outline_of
from compress.edits.latent.source import attention_of
from compress.edits.mla import MlaConfig, shape_of
from compress.errors import CheckpointError, RecipeError
from compress.passes.structure import identity
from compress.passes.structure.split import with_frequencies
from compress.recipe.reading.parse import parse
from compress.report.schema import Report
from compress.verbs import RunOptions, make_plan, open_model, run
from helpers.in_transformers import lost
from helpers.short_runs import (
    WORDS,
    kill_at_each_fifth,
    killed_at,
    recipe,
    result_of,
    text_source,
)

pytestmark = pytest.mark.usefixtures("answered_here")
TEXT = WORDS * 5
WHOLE = {"rank": 1.0, "rope_dim": 1.0}
# Grouped keys, biases of q, k and v, biases of all, other frequencies.
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
STRETCHED = {"rope_parameters": YARN, "max_position_embeddings": 512}
KINDS = [
    pytest.param("llama", {}, id="llama"),
    pytest.param("qwen2", {}, id="qwen2"),
    pytest.param("llama", {"attention_bias": True, "tied": True}, id="biased"),
    pytest.param("mistral", {}, id="mistral", marks=pytest.mark.long),
    pytest.param("llama", STRETCHED, id="yarn", marks=pytest.mark.long),
]


def mla(**options: Any) -> dict[str, Any]:
    return {"method": "mla", **options}


@pytest.mark.parametrize(("family", "options"), KINDS)
def test_all_of_it_in_another_class_says_the_same(
    tiny, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    source = tiny(family, dtype="fp32", rms_norm_eps=1e-5, **options)
    report = run(recipe(mla(**WHOLE), calibration=text_source(tmp_path)), source, tmp_path / "out")
    assert report.loads is not None
    assert report.loads.proof == "logits"
    assert report.loads.model_class == "DeepseekV3ForCausalLM"
    assert lost(tmp_path / "out", source, TEXT) < 1e-8
    for before, after in attention_off(report):
        assert before == after < 1e-6


def attention_off(report: Report) -> list[tuple[float, float]]:
    """Of each block: how far attention was from the source's before queries were refitted, and is
    then, in nats."""
    notes = [x.note for stage in report.stages for x in stage.repairs if ".q_" in x.linear]
    assert notes
    found = [re.findall(r"(?:is|was) (\S+)", note) for note in notes]
    return [(float(before), float(after)) for after, before in found]


def test_queries_make_up_for_what_keys_lack(tiny, tmp_path: Path) -> None:
    """In every block, on texts that no fit has seen; also where an earlier stage left the model."""
    source = tiny("llama", num_key_value_heads=4, dtype="fp32")
    data, stage = text_source(tmp_path, samples=16), mla(rank=24, rope_dim=8, rope="stride")
    earlier = {"alone": (), "ffn": ({"method": "prune_width", "ffn": 96},)}
    earlier["heads"] = ({"method": "gqa", "groups": 2},)
    for name, before in earlier.items():
        report = run(recipe(*before, stage, calibration=data), source, tmp_path / name)
        notes = [x.note for x in report.stages[len(before)].repairs if ".q_" in x.linear]
        whose = "that of the block before the stage" if name == "heads" else "the source's"
        assert all(f"nats from {whose}" in note for note in notes)
        off = attention_off(report)
        assert len(off) == 2
        assert all(after < before for before, after in off)


def test_in_16_bits_the_stream_is_scaled_by_a_power_of_two(tiny, tmp_path: Path) -> None:
    """So what writes to it, and the embedding, lose no bit; a tied head is undone in the norm."""
    source = tiny("llama", rms_norm_eps=1e-5, tied=True)
    asked = recipe(mla(**WHOLE, repair="none"), calibration=text_source(tmp_path))
    report = run(asked, source, tmp_path / "out")
    before, after = (load_file(x / "model.safetensors") for x in (source, tmp_path / "out"))
    for name, factor in (
        ("model.embed_tokens", 0.25),
        ("model.layers.1.self_attn.o_proj", 0.25),
        ("model.layers.1.mlp.down_proj", 0.25),
        ("model.layers.1.mlp.up_proj", 1),
        ("model.norm", 4),
    ):
        assert (after[f"{name}.weight"] == before[f"{name}.weight"] * factor).all(), name
    assert any("norms get an eps of 1.6e-05 in place of 1e-05" in x for x in report.notes)
    assert lost(tmp_path / "out", source, TEXT) < 1e-3


@pytest.mark.parametrize("rope", ["stride", "top", "any"])
def test_what_is_left_loads_and_takes_what_was_planned(tiny, tmp_path: Path, rope: str) -> None:
    source = tiny("llama", num_key_value_heads=4, dtype="fp32")
    data, found = text_source(tmp_path, samples=16), {}
    for repair in ("none", "drift"):
        asked = recipe(mla(rank=24, rope_dim=8, rope=rope, repair=repair), calibration=data)
        report = run(asked, source, tmp_path / repair)
        plan = make_plan(asked, source)
        assert report.result.bytes == plan.shards.total_bytes
        assert report.result.kv_bytes_per_token * 4 == report.source.kv_bytes_per_token
        assert report.loads is not None
        assert report.loads.proof == "logits"
        found[repair] = lost(tmp_path / repair, source, TEXT)
    assert found["drift"] < found["none"]


def test_what_scores_and_outputs_say_loses_less_than_sizes(tiny, tmp_path: Path) -> None:
    """Than the starts of others, which look at keys and values alone, or at weights."""
    source = tiny("llama", num_key_value_heads=4, dtype="fp32")
    data, found = text_source(tmp_path, samples=16), {}
    ways = [("scores", 1), ("transmla", 1), ("transmla", 2), ("care", 1), ("svd", 1)]
    for start, fold in ways:
        stage = mla(rank=24, rope_dim=8, rope="stride", start=start, freqfold=fold, repair="none")
        out = tmp_path / f"{start}-{fold}"
        run(recipe(stage, calibration=data), source, out)
        found[start, fold] = lost(out, source, TEXT)
    assert min(found, key=found.__getitem__) == ("scores", 1)
    assert len(set(found.values())) == len(ways)


@pytest.mark.parametrize("start", ["transmla", "care", "svd"])
def test_one_head_of_keys_and_values_is_its_own_latent(tiny, tmp_path: Path, start: str) -> None:
    source = tiny("llama", num_key_value_heads=1, dtype="fp32")
    stage = mla(**WHOLE, rope="stride", start=start, repair="none")
    run(recipe(stage, calibration=text_source(tmp_path)), source, tmp_path / "out")
    assert lost(tmp_path / "out", source, TEXT) < 1e-8


def test_a_budget_is_split_as_it_loses_the_least_and_said_in_the_recipe(
    tiny, tmp_path: Path
) -> None:
    source = tiny("llama", num_key_value_heads=4)
    asked = recipe(mla(kv_bytes=0.25), calibration=text_source(tmp_path, samples=16))
    out = tmp_path / "out"
    report = run(asked, source, out)
    (stage,) = (x for x in report.stages if x.candidates)
    losses = {x.sizes["rope_dim"]: x.loss for x in stage.candidates}
    assert len(losses) > 1
    written = yaml.safe_load((out / "recipe.yaml").read_text())["stages"][0]
    assert losses[written["rope_dim"]] == min(losses.values())
    assert written["rank"] + written["rope_dim"] == 32
    assert len(written["frequencies"]) * 2 == written["rope_dim"]
    assert report.result.kv_bytes_per_token * 4 == report.source.kv_bytes_per_token
    run(parse((out / "recipe.yaml").read_text()), source, tmp_path / "again")
    left, right = result_of(out), result_of(tmp_path / "again")
    assert left["model.safetensors"] == right["model.safetensors"]


def test_a_budget_is_split_so_that_groups_of_a_rounding_fit(tiny) -> None:
    source = tiny("llama", num_key_value_heads=4)
    data = {"sources": "self", "samples": 4, "length": 16}
    rounds = {"method": "rtn", "scheme": "W4A16", "group_size": 16}
    for multiple, fits in ((1, False), (16, True)):
        asked = recipe(mla(kv_bytes=0.3, multiple_of=multiple), rounds, calibration=data)
        if fits:
            assert make_plan(asked, source).result.spec.blocks[0].sizes.latent.rank % 16 == 0
        else:
            with pytest.raises(RecipeError, match="not a multiple of 16"):
                make_plan(asked, source)


def test_later_stages_know_the_stream_by_its_factor(tiny, tmp_path: Path) -> None:
    """A refit behind it is held to the source's stream as it is now: at full size it changes
    nothing, and a cut is mended."""
    source = tiny("llama", dtype="fp32", rms_norm_eps=1e-5)
    data, width = text_source(tmp_path, samples=16), {"method": "prune_width", "ffn": 48}
    found = {}
    for repair in ("none", "drift"):
        asked = recipe(mla(**WHOLE), {**width, "repair": repair}, calibration=data)
        report = run(asked, source, tmp_path / repair)
        assert report.loads is not None
        assert report.loads.proof == "logits"
        found[repair] = lost(tmp_path / repair, source, TEXT)
    assert found["drift"] < 0.7 * found["none"]


def test_frequencies_are_those_of_the_source(tiny, tmp_path: Path) -> None:
    """As transformers computes them from config.json."""
    from transformers import AutoModelForCausalLM

    source = tiny("llama", num_key_value_heads=4, dtype="fp32")
    theirs = AutoModelForCausalLM.from_pretrained(source).model.rotary_emb.inv_freq
    data = text_source(tmp_path)
    for rope, rotated, kept in (
        ("stride", 8, [0, 2, 4, 6]),
        ("top", 8, [0, 1, 2, 3]),
        ("any", 12, [0, 0, 1, 3, 3, 7]),
    ):
        options = {"frequencies": kept} if rope == "any" else {}
        stage = mla(rank=16, rope_dim=rotated, rope=rope, repair="none", **options)
        run(recipe(stage, calibration=data), source, tmp_path / rope)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / rope)
        found = model.model.rotary_emb.inv_freq
        assert found.tolist() == pytest.approx(theirs[kept].tolist(), rel=3e-7)


def test_frequencies_that_follow_from_no_theta_are_written_out_or_refused(tiny) -> None:
    source = tiny("llama", rope_parameters=YARN, max_position_embeddings=512)
    data = {"sources": "self", "samples": 4, "length": 16}
    for rope in ("stride", "top"):
        with pytest.raises(RecipeError, match="take rope: any, which writes them out"):
            make_plan(recipe(mla(rank=8, rope_dim=8, rope=rope), calibration=data), source)


def test_shares_are_of_what_the_source_of_the_recipe_has(tiny) -> None:
    source = tiny("llama", num_key_value_heads=4)
    data = {"sources": "self", "samples": 4, "length": 16}
    halved = {"method": "gqa", "groups": 2}
    plan = make_plan(recipe(halved, mla(kv_bytes=0.25, rope="stride"), calibration=data), source)
    assert plan.kv_bytes_per_token[1] * 4 == plan.kv_bytes_per_token[0]
    with pytest.raises(
        RecipeError, match="of the source's cache, and the model that the stage reads"
    ):
        make_plan(recipe(halved, mla(kv_bytes=0.5), calibration=data), source)


def test_fp16_is_refused_where_a_latent_is_made_and_where_it_is_run(tiny, tmp_path: Path) -> None:
    source = tiny("llama")
    asked = recipe(mla(**WHOLE), calibration=text_source(tmp_path))
    with pytest.raises(RecipeError, match="dtype is fp16, too coarse for the latents that mla"):
        run(asked, source, tmp_path / "out", options=RunOptions(dtype="fp16"))
    run(asked, source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="take dtype bf16 or fp32"):
        open_model(tmp_path / "out", dtype="fp16")


def test_heads_that_are_0_leave_a_latent_with_room(tiny, tmp_path: Path) -> None:
    source = tiny("llama", num_key_value_heads=4, dtype="fp32")
    path = source / "model.safetensors"
    tensors = load_file(path)
    for name in "kv":
        for layer in (0, 1):
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.weight"][16:] = 0
    save_file(tensors, path, metadata={"format": "pt"})
    run(
        recipe(mla(rank=40, rope_dim=16), calibration=text_source(tmp_path)), source, tmp_path / "o"
    )
    assert lost(tmp_path / "o", source, TEXT) < 1e-8


def test_scales_behind_it_are_trained_as_they_are_stored(tiny, tmp_path: Path) -> None:
    """A tuning begins where the rounding ended, with all of the latent: without it the loss is 0.39
    at the start."""
    source = tiny("llama", num_key_value_heads=4)
    data = text_source(tmp_path, samples=16)
    rounds = {"method": "rtn", "scheme": "W4A16", "group_size": 16}
    tune = {"method": "distill", "train": ["scales"], "scope": "model", "tokens": 1024, "every": 4}
    cut = mla(rank=16, rope_dim=16, rope="stride")
    report = run(recipe(cut, rounds, tune, calibration=data), source, tmp_path / "tuned")
    (course,) = (x for stage in report.stages for x in stage.courses)
    assert course.end < course.start < 0.1


@pytest.mark.parametrize("scope", ["model", "block"])
def test_what_is_left_can_be_trained_and_stays_stock(tiny, tmp_path: Path, scope: str) -> None:
    """Latents are trained as they are, and stored as small as the class needs them."""
    source = tiny("llama", num_key_value_heads=4, rms_norm_eps=1e-5)
    data = text_source(tmp_path, samples=16)
    train = {"method": "distill", "tokens": 4096, "scope": scope, "rate": 3e-4, "every": 8}
    train["sources"] = [dict(x) for x in data["sources"]]
    cut = mla(rank=12, rope_dim=8, rope="stride")
    run(recipe(cut, calibration=data), source, tmp_path / "cut")
    report = run(recipe(cut, train, calibration=data), source, tmp_path / "trained")
    assert report.loads is not None
    assert report.loads.proof == "logits"
    assert report.loads.model_class == "DeepseekV3ForCausalLM"
    assert lost(tmp_path / "trained", source, TEXT) < lost(tmp_path / "cut", source, TEXT)
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("cut", "trained")
    )
    name = "model.layers.1.self_attn.kv_a_{}.weight"
    assert (after[name.format("layernorm")] == 8192).all()
    small = after[name.format("proj_with_mqa")][:12].abs().max()
    assert small < 1e-6
    assert (after[name.format("proj_with_mqa")] != before[name.format("proj_with_mqa")]).any()


@pytest.mark.parametrize(
    ("stage", "output", "kept"),
    [
        ({"method": "rtn", "scheme": "W4A16", "group_size": 16}, "compressed-tensors", False),
        ({"method": "rtn", "scheme": "W4A16", "group_size": 16}, "gptq", True),
        ({"method": "fp8", "scheme": "FP8"}, "compressed-tensors", True),
    ],
    ids=["bf16 scales", "fp16 scales", "one scale"],
)
def test_what_makes_a_latent_is_rounded_where_that_does_not_make_it_0(
    tiny, stage: dict[str, Any], output: str, kept: bool
) -> None:
    source = tiny("llama", num_key_value_heads=4)
    data = {"sources": "self", "samples": 4, "length": 16}
    cut = mla(rank=16, rope_dim=8, rope="stride")
    asked = recipe(cut, stage, calibration=data, output={"format": output})
    plan = make_plan(asked, source)
    reasons = {x.linear.role: x.reason for x in plan.skipped}
    assert ("kv_a" in reasons) is kept
    assert "kv_b" not in reasons
    if kept:
        assert "which this scheme or format stores as 0" in reasons["kv_a"]


@pytest.mark.parametrize(
    ("options", "kept"),
    [({"q_lora_rank": None}, True), ({"q_lora_rank": 32}, False), ({"rms_norm_eps": 1e-5}, False)],
    ids=["as a result", "a narrow latent of queries", "another eps"],
)
def test_what_makes_a_trained_latent_is_rounded_where_config_tells_it_apart(
    tiny, options: dict[str, Any], kept: bool
) -> None:
    source = tiny("deepseek_v3", **{"rms_norm_eps": 1e-6, "q_lora_rank": None, **options})
    stage = {"method": "rtn", "scheme": "W4A16", "group_size": 16}
    plan = make_plan(recipe(stage, output={"format": "gptq"}), source)
    assert ("kv_a" in {x.linear.role for x in plan.skipped}) is kept


@pytest.mark.parametrize(
    ("family", "options", "stage", "line"),
    [
        ("llama", {}, mla(), "kv_bytes is missing; say what may be cached"),
        ("llama", {}, mla(rank=8), "rank is given and rope_dim is not"),
        ("llama", {}, mla(kv_bytes=0.5, **WHOLE), "kv_bytes is given beside rank and rope_dim"),
        ("llama", {}, mla(kv_bytes=1.0), "kv_bytes is 1.0; it is a share of the source's cache"),
        ("llama", {}, mla(kv_bytes=0.03), "is 0.03, which is 1 numbers a token"),
        (
            "llama",
            {},
            mla(kv_bytes=0.5, start="transmla"),
            "chooses no frequencies; take rope: stride",
        ),
        (
            "llama",
            {},
            mla(kv_bytes=0.5, start="svd"),
            "start is svd, which chooses no frequencies; take rope: stride",
        ),
        (
            "llama",
            {},
            mla(kv_bytes=0.5, rope="stride", start="svd", freqfold=2),
            "start: svd folds no frequencies; take start: transmla or care",
        ),
        (
            "llama",
            {},
            mla(kv_bytes=0.5, rope="top", start="care", freqfold=2),
            "freqfold is 2, which takes equal steps through the frequencies; take rope: stride",
        ),
        (
            "llama",
            {},
            mla(kv_bytes=0.5, rope="stride", start="transmla", freqfold=3),
            "freqfold: is 3, which does not divide the 8 frequencies of a head",
        ),
        ("llama", {}, mla(kv_bytes=0.5, freqfold=0), "freqfold is 0; it is 1 or more"),
        ("llama", {}, mla(rank=99, rope_dim=8), "rank: is 99; the source has 32; give 1 to 32"),
        ("llama", {}, mla(rank=8, rope_dim=7), "rope_dim: is 7; numbers are rotated in twos"),
        ("llama", {}, mla(rank=8, rope_dim=6, rope="stride"), "with rope: stride it is one of"),
        ("llama", {}, mla(rank=8, rope_dim=32, rope="top"), "with rope: top it is 16 at most"),
        (
            "llama",
            {},
            mla(rank=8, rope_dim=4, frequencies=[0]),
            "has 1 indices; it takes 2 of 0 to 7, each at most 2 times",
        ),
        ("llama", {"dtype": "fp16"}, mla(kv_bytes=0.5), "put {method: cast, dtype: bf16} before"),
        ("qwen3", {}, mla(kv_bytes=0.5), "qwen3 has norms over queries and keys"),
        ("gemma2", {}, mla(kv_bytes=0.5), "gemma2 has other norms than an RMS norm before"),
        ("smollm3", {}, mla(kv_bytes=0.5), "smollm3 has layers that rotate nothing"),
        ("phi3", {}, mla(kv_bytes=0.5), "phi3 has no linears of their own for"),
        ("mixtral", {}, mla(kv_bytes=0.5), "mixtral has a mixture of experts"),
        ("mistral", {"sliding_window": 32}, mla(kv_bytes=0.5), "mistral has a window of 32 tokens"),
        ("gpt2", {}, mla(kv_bytes=0.5), "gpt2 has other norms"),
    ],
    ids=range(24),
)
def test_what_cannot_become_a_latent_is_refused_before_work(
    tiny, family: str, options: dict[str, Any], stage: dict[str, Any], line: str
) -> None:
    data = {"sources": "self", "samples": 4, "length": 16}
    with pytest.raises((RecipeError, CheckpointError)) as caught:
        make_plan(recipe(stage, calibration=data), tiny(family, **options))
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("behind", "line"),
    [
        (mla(kv_bytes=0.5), "deepseek_v3 has latent attention already"),
        ({"method": "cast", "dtype": "fp16"}, "fp16 has no numbers as small as those that make a"),
    ],
    ids=["a second one", "fp16"],
)
def test_what_cannot_come_behind_it_is_refused(tiny, behind: dict[str, Any], line: str) -> None:
    data = {"sources": "self", "samples": 4, "length": 16}
    asked = recipe(mla(**WHOLE), behind, calibration=data)
    with pytest.raises(CheckpointError) as caught:
        make_plan(asked, tiny("llama"))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_share_is_as_many_frequencies_as_the_plan_counts(tiny) -> None:
    """0.565 of 14,400 is 8,136, and less than that in floating point."""
    checkpoint = Checkpoint.open(tiny("llama"))
    attention = attention_of(outline_of(checkpoint, describe(checkpoint.config, checkpoint.shapes)))
    large = replace(attention, kind=replace(attention.kind, kv_heads=100, key_width=144))
    config = MlaConfig(rank=1.0, rope_dim=0.565)
    found = with_frequencies(large, config, torch.rand(72, 100)).frequencies
    assert found is not None
    assert 2 * len(found) == shape_of(large, config).rotated == 8136 > int(0.565 * 14_400)


@pytest.mark.long
@killed_at(0, 40)
def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    tiny, tmp_path: Path, first: int, step: int
) -> None:
    (tmp_path / "runs").mkdir()
    data = text_source(tmp_path, samples=4, length=8)
    asked = recipe(mla(kv_bytes=0.5), calibration=data)
    source = tiny("llama", num_key_value_heads=4)
    assert kill_at_each_fifth(asked, source, tmp_path / "runs", first, step)
    assert json.loads((source / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.long)])
def test_zero_compression_is_looked_at_with_few_heads_where_there_are_many(
    tiny, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of 4 heads of 16, and the first of them alone."""
    source = tiny(family, num_key_value_heads=4, dtype="fp32")
    asked = recipe(mla(rank=24, rope_dim=8), calibration=text_source(tmp_path, samples=16))
    sizes, landed = [], identity.landed

    def watched(each: Any, pair: Any, into: Any, config: Any, **options: Any) -> Any:
        sizes.append((config.rank, config.rope_dim))
        return landed(each, pair, into, config, **options)

    monkeypatch.setattr(identity, "landed", watched)
    made = []
    for keys in (256, 16):
        monkeypatch.setattr(identity, "KEYS", keys)
        made.append(run(asked, source, tmp_path / str(keys)) and result_of(tmp_path / str(keys)))
    assert sizes == [(64, 64), (16, 16)]
    assert made[0] == made[1]
