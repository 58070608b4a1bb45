"""Keys and values that become one latent, as a user asks for it: nothing is lost where all stays,
stock transformers loads the rest, and what is cached is what was asked for."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from compress.errors import CheckpointError, RecipeError
from compress.passes.structure import identity
from compress.recipe.reading.parse import parse
from compress.report.schema import Report
from compress.verbs import RunOptions, make_plan, open_model, run
from helpers.in_transformers import lost
from helpers.short_runs import (
    WHOLE,
    WORDS,
    YARN,
    kill_at_each_fifth,
    killed_at,
    mla,
    recipe,
    result_of,
    text_source,
)

pytestmark = pytest.mark.usefixtures("answered_here")
TEXT = WORDS * 5
# Grouped keys, biases of q, k and v, biases of all, no layer with a window, other frequencies.
FULL = ["full_attention"] * 2
STRETCHED = {"rope_parameters": YARN, "max_position_embeddings": 512}
KINDS = [
    pytest.param("llama", {}, id="llama"),
    pytest.param("qwen2", {}, id="qwen2"),
    pytest.param("llama", {"attention_bias": True, "tied": True}, id="biased"),
    pytest.param("mistral", {}, id="mistral", marks=pytest.mark.long),
    pytest.param("ministral", {"layer_types": FULL}, id="ministral", marks=pytest.mark.long),
    pytest.param("cwm", {"layer_types": FULL}, id="cwm", marks=pytest.mark.long),
    pytest.param("llama", STRETCHED, id="yarn", marks=pytest.mark.long),
]


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
