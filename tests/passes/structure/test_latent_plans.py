"""Keys and values that become one latent, as a recipe is planned: what sizes follow, what is
rounded behind it, and what is refused before work."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.arch.describe import describe
from compress.checkpoint import Checkpoint
from compress.checkpoint.outline import outline_of
from compress.edits.latent.source import attention_of
from compress.edits.mla import MlaConfig, shape_of
from compress.errors import CheckpointError, RecipeError
from compress.passes.structure.split import with_frequencies
from compress.verbs import make_plan
from helpers.short_runs import WHOLE, YARN, mla, recipe

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}


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
        (
            "llama",
            {"rope_parameters": DYNAMIC},
            mla(kv_bytes=0.5),
            "llama has a rotation that depends on the length of the text (dynamic)",
        ),
    ],
    ids=range(25),
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
