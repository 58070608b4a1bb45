"""A run with `kv_cache`: scales of what attention stores, and a report that counts their cost."""

import json
import re
from pathlib import Path

import pytest
import torch

from compress.blocks.kv_states import PassingCache, Peak
from compress.blocks.skeleton import Skeleton
from compress.checkpoint import Checkpoint
from compress.errors import DataError, RecipeError
from compress.formats import open_weights
from compress.formats.kv_cache import FP8_CACHE, kv_to_config
from compress.inspect.facts import result_of
from compress.passes import calibration_tokens
from compress.passes.quantize.cache_peaks import Peaks
from compress.report.html import render_html
from compress.report.terminal.table import render_table
from compress.verbs import (
    RunOptions,
    export,
    inspect_checkpoint,
    inspect_table,
    make_plan,
    plan_table,
    run,
)
from helpers.short_runs import RTN, recipe, text_source
from helpers.tiny_models import TABLED


@pytest.mark.parametrize("family", TABLED)
def test_a_block_shows_keys_and_values_and_computes_the_same(tiny, family: str) -> None:
    weights = open_weights(Checkpoint.open(tiny(family)))
    skeleton = Skeleton(weights.checkpoint.config, weights.spec, dtype=torch.float32)
    ids = torch.arange(24).reshape(2, 12) % weights.spec.vocab
    context, hidden = skeleton.context(ids), skeleton.embed(weights, ids)
    block = skeleton.load_block(weights, 0)
    key, value = Peak(), Peak()
    seen = skeleton.run_block(block, 0, hidden, context, PassingCache(key.see, value.see))
    assert torch.equal(seen, skeleton.run_block(block, 0, hidden, context))
    assert key.absmax > 0
    assert value.absmax > 0


def test_padding_has_no_say_in_a_peak() -> None:
    states = torch.zeros(1, 1, 3, 2)
    states[0, 0] = torch.tensor([[1.0, -2.0], [0.5, 0.0], [9.0, 9.0]])
    peak = Peak(mask=torch.tensor([[True, True, False]]))
    assert torch.equal(peak.see(states), states)
    assert peak.absmax == 2.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_a_peak(bad: float) -> None:
    states = torch.ones(1, 1, 3, 2)
    broken = states.clone()
    broken[0, 0, 1, 0] = bad
    peak = Peak()
    for seen in (states, broken, states):
        peak.see(seen)
    assert str(peak.absmax) == str(bad)
    padding = Peak(mask=torch.tensor([[True, False, True]]))
    padding.see(broken)
    assert padding.absmax == 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["key", "value"])
def test_keys_and_values_that_are_not_finite_are_refused(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, bad: float
) -> None:
    cache = Peaks.cache

    def broken(self: Peaks, mask: torch.Tensor | None) -> PassingCache:
        found = cache(self, mask)
        getattr(self, part).see(torch.full((1, 1, 1, 2), bad))
        return found

    monkeypatch.setattr(Peaks, "cache", broken)
    asked = recipe(RTN, kv_cache="int8", calibration=text_source(tmp_path))
    with pytest.raises(DataError) as caught:
        run(asked, tiny("llama"), tmp_path / "out")
    assert str(caught.value) == (
        f"{part}s of block 0 are not finite (largest magnitude: {bad}); run with --dtype fp32"
    )


@pytest.mark.parametrize(("name", "largest"), [("fp8", 448.0), ("int8", 127.5)])
def test_scales_are_those_of_the_cached_states(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, largest: float
) -> None:
    """The largest that transformers' own cache holds of the compressed model, on the end."""
    from transformers import AutoModelForCausalLM

    seen: list[torch.Tensor] = []
    reload = calibration_tokens.reload

    def watched(folder: Path, sha256: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        ids, mask = reload(folder, sha256)
        seen.append(ids)
        return ids, mask

    monkeypatch.setattr(calibration_tokens, "reload", watched)
    source, out = tiny("llama", dtype="fp32"), tmp_path / "out"
    asked = recipe(RTN, kv_cache=name, calibration=text_source(tmp_path))
    run(asked, source, out, options=RunOptions(dtype="fp32"))
    result = open_weights(Checkpoint.open(out))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.load_state_dict({x: result.read(x) for x in Checkpoint.open(source).tensors})
    with torch.inference_mode():
        (ids,) = seen
        cache = model(ids, use_cache=True).past_key_values
    for block, layer in zip(result.spec.blocks, cache.layers, strict=True):
        how = result.cache(block)
        assert how is not None
        for part, states in zip(how, (layer.keys, layer.values), strict=True):
            assert part.scale.shape == (1,)
            assert float(part.scale) * largest == pytest.approx(float(states.abs().max()), rel=1e-5)
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8


def test_a_data_free_recipe_without_a_cache_stays_data_free(tiny, tmp_path: Path) -> None:
    assert run(recipe(RTN), tiny("llama"), tmp_path / "plain").calibration is None


def test_a_cache_beside_attention_that_is_not_quantized(tiny, tmp_path: Path) -> None:
    """Scales of the cache go with tensors of attention, which here are copied."""
    stage = {**RTN, "targets": ["down_proj"]}
    asked = recipe(stage, kv_cache="fp8", calibration=text_source(tmp_path))
    report = run(asked, tiny("llama"), tmp_path / "out")
    result = open_weights(Checkpoint.open(tmp_path / "out"))
    assert all(result.cache(block) is not None for block in result.spec.blocks)
    dense = {layer.role: layer.scheme for layer in report.layers if layer.skipped_reason}
    assert dense["k"] == dense["v"] == dense["q"]


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_what_a_token_takes_is_told_before_and_after(tiny, tmp_path: Path, name: str) -> None:
    """2 blocks of 2 heads of 16: 128 numbers a token, of 2 bytes each and then of 1."""
    source, out = tiny("llama"), tmp_path / "out"
    asked = recipe(RTN, kv_cache=name, calibration=text_source(tmp_path))
    plan = make_plan(asked, source)
    assert plan.kv_bytes_per_token == (256, 128)
    assert "cache    256 B -> 128 B a token" in plan_table(plan)
    report = run(asked, source, out)
    assert (report.source.kv_bytes_per_token, report.result.kv_bytes_per_token) == (256, 128)
    assert re.search(r"KV cache +256 B +128 B +per token of context", render_table(report))
    page = render_html(report)
    assert "256 B" in page.partition("KV cache")[2].partition("128 B")[0]
    export(out, "modelopt", tmp_path / "modelopt")
    for folder in (out, tmp_path / "modelopt"):
        assert result_of(open_weights(Checkpoint.open(folder))).kv_bytes_per_token == 128
        shown = inspect_table(inspect_checkpoint(folder))
        assert re.search(r"  KV cache      128 B a token, stored as a\S*8 static\n", shown)


def test_a_cache_that_only_the_config_speaks_of_takes_what_it_took(tiny, tmp_path: Path) -> None:
    """Evaluation and engine leave such keys and values as they are."""
    out = tmp_path / "out"
    run(recipe(RTN), tiny("llama"), out)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = kv_to_config(FP8_CACHE)
    (out / "config.json").write_text(json.dumps(config))
    assert inspect_checkpoint(out)["kv_bytes_per_token"] == 256
    assert inspect_checkpoint(tiny("llama"))["kv_bytes_per_token"] == 256
    plan = make_plan(recipe(RTN), tiny("llama"))
    assert plan.kv_bytes_per_token == (256, 256)
    assert "cache " not in plan_table(plan)


def test_evaluation_stores_keys_and_values_as_the_result_says(tiny, tmp_path: Path) -> None:
    dense = recipe(RTN, kv_cache="int8", calibration=text_source(tmp_path))
    run(dense, tiny("llama"), tmp_path / "out")
    result = open_weights(Checkpoint.open(tmp_path / "out"))
    skeleton = Skeleton(result.checkpoint.config, result.spec, dtype=torch.float32)
    ids = torch.arange(12).reshape(1, 12)
    context, hidden = skeleton.context(ids), skeleton.embed(result, ids)
    block = skeleton.load_block(result, 0)
    stored = skeleton.run_block(block, 0, hidden, context, skeleton.stored_cache(result, 0))
    plain = skeleton.run_block(block, 0, hidden, context)
    change = float((stored - plain).norm() / plain.norm())
    assert 0 < change < 0.05


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_scales_go_along_into_formats_that_have_a_place(tiny, tmp_path: Path, name: str) -> None:
    """To the bit, there and back, as do the weights; others name the one that has."""
    stage = {"method": "rtn", "scheme": "W8A16"}
    run(
        recipe(stage, kv_cache=name, calibration=text_source(tmp_path)),
        tiny("llama"),
        tmp_path / "out",
    )
    export(tmp_path / "out", "modelopt", tmp_path / "to")
    export(tmp_path / "to", "compressed-tensors", tmp_path / "back")
    made, *others = (open_weights(Checkpoint.open(tmp_path / x)) for x in ("out", "to", "back"))
    for other in others:
        for block in made.spec.blocks:
            for a, b in zip(made.cache(block), other.cache(block), strict=True):
                assert a.scheme == b.scheme
                assert torch.equal(a.scale, b.scale.to(a.scale.dtype))
            for linear in block.linears:
                assert torch.equal(made.read(linear.tensor), other.read(linear.tensor))
    cache = {"fp8": "a-fp8 static", "int8": "a8 static"}[name]
    for to in ("gptq", "gptq_v2"):
        with pytest.raises(RecipeError) as caught:
            export(tmp_path / "out", to, tmp_path / "none")
        assert str(caught.value).endswith(
            f"has scales of a key/value cache ({cache}), which {to} has no place for; formats that"
            " take all of this checkpoint: modelopt, dense"
        )
    for to in ("awq", "fp8", "bitsandbytes"):
        with pytest.raises(
            RecipeError, match=r"formats that take all of .* checkpoint: modelopt, dense$"
        ):
            export(tmp_path / "out", to, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_formats_without_a_place_refuse(tiny, tmp_path: Path) -> None:
    asked = recipe(
        RTN, kv_cache="fp8", calibration=text_source(tmp_path), output={"format": "dense"}
    )
    with pytest.raises(RecipeError, match="kv_cache: is 'fp8', which format 'dense' has no place"):
        make_plan(asked, tiny("llama"))


def test_it_needs_data() -> None:
    with pytest.raises(RecipeError, match="kv_cache: 'int8' needs calibration data"):
        recipe(RTN, kv_cache="int8")


def test_latents_have_no_place_for_scales(tiny, tmp_path: Path) -> None:
    asked = recipe(RTN, kv_cache="fp8", calibration=text_source(tmp_path))
    with pytest.raises(RecipeError, match=r"^model\.layers\.0: no key projection is known in it"):
        make_plan(asked, tiny("deepseek_v3"))
