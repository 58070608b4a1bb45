"""The output head by what it reads, the embedding by its rows, and models that tie the two."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compress.arch.describe import describe
from compress.blocks.skeleton import Skeleton
from compress.checkpoint import Checkpoint
from compress.checkpoint.ties import head_name
from compress.errors import CheckpointError, RecipeError
from compress.formats import Weights, open_weights
from compress.methods.outcome import relative_error
from compress.passes.quantize import calibrated, head
from compress.plan.source import untied
from compress.report.schema import Layer, Report
from compress.verbs import RunOptions, make_plan, run
from helpers.short_runs import GPTQ, RTN, recipe, text_source

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ONLY_HEAD = {"targets": ["lm_head"], "ignore": []}
BOTH = {"targets": ["lm_head", "embedding"], "ignore": []}


def layers(report: Report) -> dict[str, Layer]:
    return {layer.name: layer for layer in report.stages[0].layers}


def scores(folder: Path, ids: Tensor, *, untie: bool = False) -> Tensor:
    """Logits of a checkpoint by our own blocks in fp32."""
    checkpoint = Checkpoint.open(folder)
    if untie:
        checkpoint = untied(checkpoint, describe(checkpoint.config, checkpoint.shapes))
    weights = open_weights(checkpoint)
    skeleton = Skeleton(checkpoint.config, weights.spec, dtype=torch.float32)
    hidden, context = skeleton.embed(weights, ids), skeleton.context(ids)
    for block in weights.spec.blocks:
        module = skeleton.load_block(weights, block.index)
        hidden = skeleton.run_block(module, block.index, hidden, context)
    final = skeleton.final_hidden(weights, hidden)
    return skeleton.logits(weights, final.flatten(0, 1))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_untying_changes_nothing(tiny, family: str) -> None:
    ids = torch.arange(3, 35).reshape(2, 16)
    folder = tiny(family, tied=True, dtype="fp32")
    assert torch.equal(scores(folder, ids, untie=True), scores(folder, ids))


def test_a_tied_head_gets_a_tensor_of_its_own(tiny, tmp_path: Path) -> None:
    source, out = tiny("llama", tied=True), tmp_path / "out"
    asked = recipe(RTN, {**RTN, **ONLY_HEAD, "scheme": "W8A16", "group_size": 32})
    plan = make_plan(asked, source)
    assert any("are one tensor in the source" in warning for warning in plan.warnings)
    report = run(asked, source, out)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert HEAD not in before
    assert torch.equal(after[EMBEDDING], before[EMBEDDING])
    stored = open_weights(Checkpoint.open(out)).read(HEAD)
    assert 0 < relative_error(before[EMBEDDING].float(), stored.float(), None) < 1e-4
    assert report.source.params == sum(t.numel() for t in before.values())
    assert sum(part.bytes_before for part in report.result.sizes) == report.source.bytes
    assert sum(part.bytes_after for part in report.result.sizes) == report.result.bytes


@pytest.mark.parametrize("tied", [True, False])
def test_a_calibrated_head_loses_less(tiny, tmp_path: Path, tied: bool) -> None:
    """Judged by what the head reads, GPTQ beats rounding; and what it reads is the final norm's
    output behind quantized blocks."""
    source, data = tiny("llama", tied=tied), text_source(tmp_path)
    found = {}
    for method, options in (("gptq", {}), ("rtn", {"scale_search": "importance"})):
        stage = {**GPTQ, **ONLY_HEAD, "method": method, "scheme": "W3A16", **options}
        out = tmp_path / method
        report = run(recipe(GPTQ, stage, calibration=data), source, out)
        found[method] = layers(report)["lm_head"]
        assert found[method].tokens == layers(report)["model.layers.0.self_attn.q_proj"].tokens
    assert found["gptq"].method == "gptq"
    assert found["gptq"].error < 0.8 * found["rtn"].error


def test_what_a_head_is_judged_by(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 32 rows give what the whole head at once gives."""
    source, data = tiny("llama", dtype="fp32"), text_source(tmp_path)
    asked = recipe(GPTQ, {**GPTQ, **ONLY_HEAD}, calibration=data)
    whole = layers(run(asked, source, tmp_path / "whole"))["lm_head"]
    monkeypatch.setattr("compress.passes.copying.ROWS_AT_ONCE", 32 * 64)
    cut = layers(run(asked, source, tmp_path / "cut"))["lm_head"]
    assert cut.error == pytest.approx(whole.error, rel=1e-5)
    one, other = (load_file(tmp_path / x / "model.safetensors") for x in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("scheme", "method", "options"),
    [
        ("W8A8_STATIC", "rtn", {}),
        ("FP8", "fp8", {}),
        ("LLM_INT8_CALIBRATED", "llm_int8", {}),
        ("NVFP4A16", "nvfp4", {"scale_search": "importance"}),
    ],
)
def test_heads_with_quantized_inputs(
    tiny, tmp_path: Path, scheme: str, method: str, options: dict[str, str]
) -> None:
    stage = {"method": method, "scheme": scheme, **ONLY_HEAD, **options}
    out, source = tmp_path / "out", tiny("llama", dtype="fp32")
    report = run(recipe(stage, calibration=text_source(tmp_path)), source, out)
    layer = layers(report)["lm_head"]
    assert layer.skipped_reason is None
    ids = torch.arange(3, 35).reshape(2, 16)
    change = (scores(out, ids) - scores(source, ids)).abs()
    assert 0 < change.max() < (0.7 if method == "nvfp4" else 0.3)


def test_blocks_are_calibrated_on_the_rounded_embedding(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []
    original = head.round_rows

    def watched(work: Any, embedding: Any, rows: Tensor) -> Tensor:
        seen.append(original(work, embedding, rows))
        return seen[-1]

    monkeypatch.setattr(calibrated, "round_rows", watched)
    out = tmp_path / "out"
    asked = recipe(GPTQ, {**RTN, **BOTH}, calibration=text_source(tmp_path))
    run(asked, tiny("llama"), out)
    weights = open_weights(Checkpoint.open(out))
    quantized = weights.quantized(EMBEDDING)  # type: ignore[union-attr]
    assert quantized is not None
    table = quantized.dequantize()
    assert seen
    assert all((row == table).all(dim=1).any() for rows in seen for row in rows)


def test_a_packed_embedding_is_decoded_once(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all batches that are embedded before the blocks; then it is let go."""
    run(recipe({**RTN, **BOTH}), tiny("llama"), tmp_path / "out")
    weights = open_weights(Checkpoint.open(tmp_path / "out"))
    skeleton = Skeleton(weights.checkpoint.config, weights.spec, dtype=torch.float32)
    read: list[str] = []
    whole = type(weights).read

    def counted(source: Weights, tensor: str, *, check_finite: bool = False) -> Tensor:
        read.extend([tensor] * (tensor == EMBEDDING))
        return whole(source, tensor, check_finite=check_finite)

    monkeypatch.setattr(type(weights), "read", counted)
    ids = torch.arange(3, 35).reshape(2, 16)
    one, other = (skeleton.embed(weights, ids + i) for i in (0, 9))
    assert read == [EMBEDDING]
    assert not torch.equal(one, other)
    with pytest.raises(
        CheckpointError, match=r"token id 256 is outside .*embed_tokens.weight, which"
    ):
        skeleton.embed(weights, ids + 222)
    skeleton.load_block(weights, 0)
    assert torch.equal(skeleton.embed(weights, ids), one)
    assert read == [EMBEDDING, EMBEDDING]


def test_a_run_is_killed_before_the_head_and_resumed(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny("llama", tied=True)
    asked = recipe(GPTQ, {**GPTQ, **ONLY_HEAD}, calibration=text_source(tmp_path))
    run(asked, source, tmp_path / "whole")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(calibrated, "quantize_head", killed)
        with pytest.raises(KeyboardInterrupt):
            run(asked, source, tmp_path / "out")
    run(asked, source, tmp_path / "out", options=RunOptions(resume=True))
    one, other = (tmp_path / x / "model.safetensors" for x in ("whole", "out"))
    assert one.read_bytes() == other.read_bytes()


def test_stars_do_not_mean_the_embedding(tiny) -> None:
    plan = make_plan(recipe({**RTN, "ignore": []}), tiny("llama"))
    assert {m.linear.role for m in plan.modules} >= {"head", "q"}
    reasons = {s.linear.role: s.reason for s in plan.skipped}
    assert reasons["embedding"] == "no stage targets it"


@pytest.mark.parametrize(
    "target", ["embedding", "embed_tokens", "model.embed_tokens", "re:.*embed.*"]
)
def test_names_of_the_embedding(tiny, target: str) -> None:
    plan = make_plan(recipe({**RTN, "targets": [target]}), tiny("llama"))
    assert [m.linear.name for m in plan.modules] == ["model.embed_tokens"]


@pytest.mark.parametrize(
    ("stage", "tied", "message"),
    [
        ({**RTN, "targets": ["embedding"]}, True, "add 'lm_head' to the targets of a stage"),
        ({**GPTQ, "targets": ["embedding"]}, False, "stage of its own with method rtn"),
        (
            {"method": "rtn", "scheme": "W8A8", "targets": ["embedding"]},
            False,
            "int8 sym channel a8 is not for model.embed_tokens",
        ),
        (
            {"method": "nvfp4", "scheme": "NVFP4A16", "targets": ["embedding"]},
            False,
            "use W8A16 or W4A16 with method rtn",
        ),
    ],
)
def test_what_an_embedding_does_not_take(
    tiny, tmp_path: Path, stage: dict[str, Any], tied: bool, message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe(GPTQ, stage, calibration=text_source(tmp_path)), tiny("llama", tied=tied))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("embedding", "name"),
    [
        ("model.embed_tokens.weight", "lm_head.weight"),
        ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"),
        ("model.language_model.embed_tokens.weight", "lm_head.weight"),
        ("transformer.wte.weight", "lm_head.weight"),
    ],
)
def test_where_a_head_belongs(tiny, embedding: str, name: str) -> None:
    from dataclasses import replace

    checkpoint = Checkpoint.open(tiny("llama"))
    spec = describe(checkpoint.config, checkpoint.shapes)
    assert head_name(replace(spec, embedding=embedding)) == name


@pytest.mark.parametrize("ignore", [None, [], ["lm_head", "router"]])
def test_a_target_that_names_the_head_means_it(tiny, ignore: list[str] | None) -> None:
    """Unless the stage's own ignore says otherwise: then nothing is untied."""
    stage: dict[str, Any] = {**RTN, "targets": ["*", "lm_head"]}
    asked = recipe(stage if ignore is None else {**stage, "ignore": ignore})
    if ignore:
        with pytest.raises(RecipeError, match="'lm_head' matches no layer"):
            make_plan(asked, tiny("llama", tied=True))
        return
    plan = make_plan(asked, tiny("llama", tied=True))
    assert "head" in {m.linear.role for m in plan.modules}
