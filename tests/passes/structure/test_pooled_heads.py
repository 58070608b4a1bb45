"""Heads that share keys and values as a user asks for it: what is the same stays the same, stock
classes load the rest, and principal components lose less than means."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.errors import CheckpointError, RecipeError
from compress.verbs import make_plan, run
from helpers.in_transformers import lost
from helpers.short_runs import WORDS, kill_at_each_fifth, killed_at, recipe, text_source

pytestmark = pytest.mark.usefixtures("answered_here")
TEXT = WORDS * 5
STORIES = "text/tinystories/tinystories_test.txt"
HEADS, WIDTH = 4, 16
# One linear for all; norms of heads; then biases, norms behind attention, layers without rotation,
# experts.
MORE = ("llama", "mistral", "qwen2", "gemma2", "smollm3", "mixtral", "qwen3_moe", "gemma3_text")
KINDS = ["phi3", "qwen3", *(pytest.param(x, marks=pytest.mark.long) for x in MORE)]


def gqa(groups: float, **options: Any) -> dict[str, Any]:
    return {"method": "gqa", "groups": groups, **options}


def turned(weight: Tensor, phases: Tensor) -> Tensor:
    """Rows of a head, [16, in], turned in twos by angles [8], as the rotary embedding does."""
    one, other = weight.chunk(2)
    cos, sin = phases.cos()[:, None], phases.sin()[:, None]
    return torch.cat([cos * one - sin * other, sin * one + cos * other])


def written_out(source: Path, out: Path, *, turns_keys: bool = True) -> Path:
    """The same function with keys and values for each query head, all turned and shuffled."""
    config = json.loads((source / "config.json").read_text())
    group = HEADS // config["num_key_value_heads"]
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(source / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.self_attn.{{}}_proj.weight"
        q, k, v = (tensors[name.format(x)].unflatten(0, (-1, WIDTH)) for x in "qkv")
        o = tensors[name.format("o")].unflatten(1, (-1, WIDTH)).transpose(0, 1)
        order = torch.randperm(HEADS, generator=generator)
        phases = torch.rand(HEADS, WIDTH // 2, generator=generator) * 6 * turns_keys
        turns = torch.linalg.qr(torch.randn(HEADS, WIDTH, WIDTH, generator=generator))[0]
        pairs = list(enumerate(order.tolist()))
        made = {
            "q": torch.cat([turned(q[head], phases[i]) for i, head in pairs]),
            "k": torch.cat([turned(k[head // group], phases[i]) for i, head in pairs]),
            "v": torch.cat([turns[i] @ v[head // group] for i, head in pairs]),
            "o": torch.cat([o[head] @ turns[i].T for i, head in pairs], dim=1),
        }
        tensors |= {name.format(part): value.contiguous() for part, value in made.items()}
    out.mkdir()
    for path in source.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    config["num_key_value_heads"] = HEADS
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_heads_that_are_one_are_found_and_nothing_is_lost(tiny, tmp_path: Path) -> None:
    source = tiny("llama", num_key_value_heads=2, dtype="fp32")
    twin = written_out(source, tmp_path / "twin")
    assert lost(twin, source, TEXT) < 1e-9
    report = run(recipe(gqa(0.5), calibration=text_source(tmp_path)), twin, tmp_path / "out")
    assert lost(tmp_path / "out", source, TEXT) < 1e-9
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, 2)
    assert report.loads is not None
    assert report.loads.proof == "logits"
    assert report.result.kv_bytes_per_token * 2 == report.source.kv_bytes_per_token


def test_a_trained_model_written_out_becomes_what_it_was(shared_dir: Path, tmp_path: Path) -> None:
    twin, source = (shared_dir / "models" / f"stories260K{x}" for x in ("-mha-twin", ""))
    data = {"sources": [{"text": str(shared_dir / STORIES)}], "samples": 16, "length": 64}
    report = run(recipe(gqa(4), calibration=data), twin, tmp_path / "out")
    assert abs(lost(tmp_path / "out", source, TEXT)) < 1e-6
    assert report.loads is not None
    assert report.loads.proof == "logits"


def test_a_second_stage_of_it_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"stages\[1\].method: is a second gqa; one of them says"):
        recipe(gqa(2), gqa(1), calibration={"sources": "self"})


def test_heads_that_are_one_behind_a_norm_are_found_and_nothing_is_lost(
    tiny, tmp_path: Path
) -> None:
    """Also where all that is turned are values: no phase passes the gain of a norm."""
    source = tiny("qwen3", num_key_value_heads=2, dtype="fp32")
    twin = written_out(source, tmp_path / "twin", turns_keys=False)
    run(recipe(gqa(0.5), calibration=text_source(tmp_path)), twin, tmp_path / "out")
    assert lost(tmp_path / "out", source, TEXT) < 1e-9


@pytest.mark.parametrize("family", KINDS)
def test_what_is_shared_loads_in_its_own_class_and_loses_less_than_means(
    tiny, tmp_path: Path, family: str
) -> None:
    source = tiny(family, num_key_value_heads=HEADS)
    data, found = text_source(tmp_path, samples=24), {}
    for pool, repair in (("mean", "none"), ("pca", "none"), ("pca", "drift")):
        asked = recipe(gqa(2, pool=pool, repair=repair), calibration=data)
        out = tmp_path / f"{pool}.{repair}"
        report = run(asked, source, out)
        plan = make_plan(asked, source)
        assert report.result.bytes == plan.shards.total_bytes
        assert plan.kv_bytes_per_token[1] * 2 == plan.kv_bytes_per_token[0]
        assert report.loads is not None
        assert report.loads.proof == "logits"
        found[pool, repair] = lost(out, source, TEXT)
    assert found["pca", "none"] < found["mean", "none"]
    assert found["pca", "drift"] < found["pca", "none"]


@pytest.mark.long
@pytest.mark.parametrize("pool", ["align", "first"])
def test_other_ways_to_pool(tiny, tmp_path: Path, pool: str) -> None:
    source = tiny("llama", num_key_value_heads=HEADS, dtype="fp32")
    data = text_source(tmp_path, samples=24)
    for repair in ("none", "drift"):
        asked = recipe(gqa(2, pool=pool, repair=repair), calibration=data)
        run(asked, source, tmp_path / repair)
    assert lost(tmp_path / "drift", source, TEXT) < lost(tmp_path / "none", source, TEXT)


@pytest.mark.parametrize(
    ("family", "stage", "line"),
    [
        ("llama", gqa(3), "3 heads of keys and values do not stand for equally many of the"),
        ("llama", gqa(5), "groups: is 5; the source has 4"),
        ("llama", gqa(4), "groups: is 4, and the model has 4 heads of keys and values; give"),
        ("llama", {"method": "gqa"}, "groups is missing; say how many heads of keys and values"),
        ("gpt2", gqa(2), "gpt2 has keys and values for each query head, and its config.json no"),
        ("qwen3", gqa(2, pool="align"), "take another pool than align"),
        ("olmo2", gqa(2), "olmo2 has norms over all heads of queries and of keys"),
    ],
    ids=range(7),
)
def test_what_cannot_be_shared_is_refused_before_work(
    tiny, family: str, stage: dict[str, Any], line: str
) -> None:
    options = {} if family == "gpt2" else {"num_key_value_heads": HEADS}
    data = {"sources": "self", "samples": 4, "length": 16}
    with pytest.raises((RecipeError, CheckpointError)) as caught:
        make_plan(recipe(stage, calibration=data), tiny(family, **options))
    assert line in str(caught.value)


@pytest.mark.long
@killed_at(0, 40)
def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    tiny, tmp_path: Path, first: int, step: int
) -> None:
    (tmp_path / "runs").mkdir()
    asked = recipe(gqa(2), calibration=text_source(tmp_path, samples=2, length=8))
    source = tiny("llama", num_key_value_heads=HEADS)
    assert kill_at_each_fifth(asked, source, tmp_path / "runs", first, step)
