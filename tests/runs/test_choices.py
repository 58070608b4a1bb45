"""What a recipe may choose: mixes of stages, the head, experts, order, formats."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.checkpoint import Checkpoint
from compress.errors import RecipeError
from compress.formats import Weights, open_weights
from compress.methods.outcome import relative_error
from compress.methods.rtn import UNSEEN
from compress.passes.quantize import calibrated, observe
from compress.report.schema import Layer, Report
from compress.verbs import make_plan, run
from helpers.short_runs import GPTQ, RTN, SELF, recipe, text_source

HEAD = {"method": "rtn", "scheme": "W8A16", "targets": ["lm_head"], "ignore": []}


def layers(report: Report) -> dict[str, Layer]:
    return {layer.name: layer for layer in report.stages[0].layers}


def opened(out: Path) -> Weights:
    weights = open_weights(Checkpoint.open(out))
    assert weights.format.coded
    return weights


def scheme_of(out: Path, name: str) -> str | None:
    q = opened(out).quantized(name + ".weight")
    return None if q is None else q.scheme.describe()


def test_several_stages_share_a_model(tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = run(
        recipe(
            {**GPTQ, "targets": ["self_attn.*"]},
            {"method": "rtn", "scheme": "W8A16", "targets": ["down_proj"]},
            {**RTN, "targets": ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]},
            HEAD,
            calibration=text_source(tmp_path),
        ),
        tiny("llama"),
        out,
    )
    found = layers(report)
    assert found["model.layers.0.self_attn.q_proj"].method == "gptq"
    assert found["model.layers.0.mlp.down_proj"].scheme == "int8 sym channel"
    assert found["model.layers.0.mlp.down_proj"].tokens == 64, "judged by what it reads"
    assert found["model.layers.0.mlp.up_proj"].skipped_reason == "no stage targets it"
    assert found["model.layers.1.mlp.up_proj"].scheme == "int4 sym g32"
    assert found["lm_head"].scheme == "int8 sym channel"
    for name, layer in found.items():
        stored = scheme_of(out, name)
        assert stored == (None if layer.skipped_reason else layer.scheme)


@pytest.mark.parametrize("alone", [True, False])
def test_the_head_is_quantized_when_asked(tiny, tmp_path: Path, alone: bool) -> None:
    out, source = tmp_path / "out", tiny("llama")
    head = {**HEAD, **({} if alone else {"scheme": "W4A16", "group_size": 32})}
    report = run(recipe(head if alone else {**RTN, "ignore": []}), source, out)
    assert layers(report)["lm_head"].skipped_reason is None
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    assert block["ignore"] == [] or "lm_head" not in block["ignore"]
    assert "lm_head" in block["config_groups"]["group_0"]["targets"]
    weights = opened(out)
    original = open_weights(Checkpoint.open(source)).read("lm_head.weight").float()
    q = weights.quantized("lm_head.weight")
    assert q is not None
    assert relative_error(original, q.dequantize(), None) == pytest.approx(
        layers(report)["lm_head"].error
    )
    assert report.result.sizes[0].bytes_before > 0


def test_merged_layers_must_be_alike(tiny, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        make_plan(
            recipe({**RTN, "targets": ["q_proj"]}, {**RTN, "targets": ["k_proj", "v_proj"],
                    "scheme": "W8A16"}),
            tiny("llama"),
        )  # fmt: skip
    assert str(caught.value) == (
        "recipe:6: stages[0].targets: model.layers.0.self_attn.q_proj would be int4 sym g32 and"
        " model.layers.0.self_attn.k_proj int8 sym g32; runtimes merge q_proj, k_proj and v_proj"
        " into one matrix, so name all of them here or none"
    )


def test_the_key_that_sets_a_merged_layer_apart_is_named(tiny, tmp_path: Path) -> None:
    gate, up = (f"model.layers.0.mlp.{x}_proj" for x in ("gate", "up"))
    for change, place, words in (
        ({"ignore": ["up_proj", "lm_head"]}, ".ignore", f"{up} would be unquantized and {gate}"),
        (
            {"targets": ["gate_proj"]},
            ".targets",
            f"{up} would be unquantized and {gate} int4 sym g32",
        ),
        (
            {"overrides": [{"targets": ["down_proj"], "bits": 5}, {"targets": [gate], "bits": 8}]},
            ".overrides[1].targets",
            f"{gate} would be int8 sym g32 and {up} int4 sym g32",
        ),
        (
            {"overrides": [{"targets": ["gate_proj"], "skip": True}]},
            ".overrides[0].targets",
            f"{gate} would be unquantized and {up} int4 sym g32",
        ),
    ):
        file = tmp_path / "r.yaml"
        file.write_text(json.dumps({"name": "x", "stages": [{**RTN, **change}]}, indent=1))
        with pytest.raises(RecipeError) as caught:
            make_plan(file, tiny("llama"))
        key = place.removeprefix(".").partition("[")[0].partition(".")[0]
        line = next(i for i, text in enumerate(file.read_text().splitlines(), 1) if key in text)
        found = str(caught.value)
        assert found.startswith(f"{file}:")
        assert f": stages[0]{place}: {words}" in found
        assert found.endswith(" into one matrix, so name all of them here or none")
        assert int(found.removeprefix(f"{file}:").partition(":")[0]) >= line


@pytest.mark.parametrize("act_order", ["none", "static", "group"])
def test_orders(tiny, tmp_path: Path, act_order: str) -> None:
    out = tmp_path / "out"
    run(
        recipe({**GPTQ, "act_order": act_order}, calibration=text_source(tmp_path)),
        tiny("qwen3"),
        out,
    )
    q = opened(out).quantized("model.layers.1.mlp.down_proj.weight")
    assert q is not None
    assert (q.g_idx is not None) == (act_order == "group")


def test_group_order_needs_groups(tiny, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="'group' needs granularity 'group', not 'channel'; use"):
        make_plan(
            recipe({"method": "gptq", "scheme": "W8A16", "act_order": "group"}, calibration=SELF),
            tiny("llama"),
        )


@pytest.mark.parametrize(
    "scheme",
    [
        {"bits": 3, "symmetric": False, "group_size": 16},
        {"bits": 8, "granularity": "channel"},
        {"bits": 4, "granularity": "tensor"},
    ],
)
def test_rounding_by_importance(tiny, tmp_path: Path, scheme: dict[str, object]) -> None:
    stage = {"method": "rtn", "scheme": scheme, "scale_search": "importance"}
    report = run(
        recipe(stage, calibration=text_source(tmp_path)), tiny("llama"), tmp_path / "importance"
    )
    plain = run(recipe({**stage, "scale_search": "mse"}), tiny("llama"), tmp_path / "mse")
    assert all(x.tokens == 64 for x in layers(report).values() if x.skipped_reason is None)
    assert all(x.tokens is None for x in layers(plain).values())


@pytest.mark.parametrize("experts", ["all", "routed"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_no_expert_is_missing(tiny, tmp_path: Path, family: str, experts: str) -> None:
    data = text_source(tmp_path, samples=12)
    stage = {**GPTQ, "experts": experts, "min_tokens": 1.5}
    report = run(recipe(stage, calibration=data), tiny(family), tmp_path / "out")
    found = [x for x in layers(report).values() if x.expert is not None]
    assert {(x.block, x.expert) for x in found} == {(b, e) for b in (0, 1) for e in range(4)}
    width = {"gate": 64, "up": 64, "down": 96 if family == "mixtral" else 32}
    for x in found:
        assert x.skipped_reason is None
        assert x.tokens is not None
        if experts == "all":
            assert x.tokens == 12 * 16
        if x.tokens < 1.5 * width[x.role]:
            assert x.method == "rtn"
            assert x.kept_reason == (
                f"{x.tokens} tokens reached the expert, 1.5 x {width[x.role]} wanted"
            )
    if experts == "routed":
        for block in (0, 1):
            routed = sum(x.tokens or 0 for x in found if x.block == block and x.role == "down")
            assert routed == 2 * 12 * 16, "every token goes to two experts"


def test_experts_no_token_reaches(tiny, tmp_path: Path) -> None:
    """A router that always sends tokens to experts 0 and 1."""
    source = tmp_path / "source"
    source.mkdir()
    for file in tiny("mixtral").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if name.endswith("block_sparse_moe.gate.weight"):
            tensors[name] = torch.zeros_like(tensors[name])  # ties go to the first experts
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for method, kept in (("gptq", "0 tokens reached the expert, 2 x 64 wanted"), ("rtn", UNSEEN)):
        stage = {**GPTQ, "experts": "routed"} if method == "gptq" else RTN
        stage = {**stage, **({} if method == "gptq" else {"scale_search": "importance"})}
        data = text_source(tmp_path, samples=12)
        report = run(recipe(stage, calibration=data), source, tmp_path / method)
        unseen = [x for x in layers(report).values() if x.tokens == 0]
        assert len({(x.block, x.expert) for x in unseen}) == 4
        for x in unseen:
            assert x.role == "down" or x.kept_reason == kept
            assert x.kept_reason is not None
            assert x.error is not None
            assert x.error > 0


def test_all_tokens_give_the_same_weights_whatever_fits_at_once(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Observation in several rounds must still see the unquantized block."""
    from conftest import tree_hashes

    asked = recipe(GPTQ, calibration=text_source(tmp_path, samples=12))
    run(asked, tiny("mixtral"), tmp_path / "one")
    monkeypatch.setattr(observe, "HESSIAN_BYTES", 1)
    run(asked, tiny("mixtral"), tmp_path / "many")
    one, many = (
        {k: v for k, v in tree_hashes(tmp_path / n).items() if not k.startswith("report/")}
        for n in ("one", "many")
    )
    assert one == many


def test_true_sequential_observes_behind_quantized_layers(tiny, tmp_path: Path) -> None:
    data, errors = text_source(tmp_path), {}
    for sequential in (False, True):
        stage = {**GPTQ, "scheme": "W2A16", "true_sequential": sequential}
        out = tmp_path / str(sequential)
        report = run(recipe(stage, calibration=data), tiny("llama"), out)
        errors[sequential] = layers(report)
    first, down = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
    assert errors[True][first].error == errors[False][first].error
    assert errors[True][down].error != errors[False][down].error


def test_integer_activations_are_felt_by_the_next_block(tiny, tmp_path: Path) -> None:
    weights = {"bits": 8, "granularity": "channel"}
    found = {}
    for bits in (None, 2):
        activation = {} if bits is None else {"activation": {"bits": bits}}
        stage = {"method": "gptq", "scheme": {**weights, **activation}}
        out = tmp_path / str(bits)
        run(recipe(stage, calibration=text_source(tmp_path)), tiny("llama"), out)
        found[bits] = opened(out)
    for block, same in ((0, True), (1, False)):
        name = f"model.layers.{block}.self_attn.q_proj.weight"
        a, b = (found[bits].quantized(name) for bits in (None, 2))
        assert a is not None
        assert b is not None
        assert torch.equal(a.codes, b.codes) == same


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_dense_results_hold_the_dequantized_weights(
    tiny, tmp_path: Path, family: str, method: str
) -> None:
    stage = GPTQ if method == "gptq" else RTN
    rest = {"calibration": text_source(tmp_path)} if method == "gptq" else {}
    source = tiny(family)
    run(recipe(stage, **rest, output={"format": "dense"}), source, tmp_path / "dense")
    run(recipe(stage, **rest), source, tmp_path / "packed")
    dense, packed = Checkpoint.open(tmp_path / "dense"), opened(tmp_path / "packed")
    assert "quantization_config" not in dense.config
    assert dict(dense.shapes) == dict(Checkpoint.open(source).shapes)
    for linear in packed.spec.linears():
        assert torch.equal(dense.read(linear.tensor), packed.read(linear.tensor))


def test_what_is_no_decoder_is_copied_and_listed(tiny, tmp_path: Path) -> None:
    """A multi-token-prediction module and a vision tower."""
    source = tmp_path / "source"
    source.mkdir()
    for file in tiny("llama").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    extra = {
        "mtp.layers.0.self_attn.q_proj.weight": torch.randn(64, 64).bfloat16(),
        "vision_tower.patch_embed.weight": torch.randn(8, 3, 4, 4),
        "vision_tower.position_ids": torch.arange(7),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(8),
        "model.layers.1.gamma": torch.randn(3),
    }
    save_file({**tensors, **extra}, source / "model.safetensors", metadata={"format": "pt"})
    for stage, rest in ((RTN, {}), (GPTQ, {"calibration": text_source(tmp_path)})):
        out = tmp_path / stage["method"]
        report = run(recipe(stage, **rest), source, out)
        result = Checkpoint.open(out)
        assert set(report.copied_tensors) == set(extra)
        for name, tensor in extra.items():
            assert torch.equal(result.read(name), tensor)
        if stage is RTN:
            assert any("model.layers.1.gamma" in line for line in report.warnings)


def test_large_tensors_go_through_in_rows(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.passes import copying
    from conftest import tree_hashes

    run(recipe({**RTN, "ignore": []}), tiny("llama"), tmp_path / "whole")
    monkeypatch.setattr(copying, "ROWS_AT_ONCE", 1000)
    run(recipe({**RTN, "ignore": []}), tiny("llama"), tmp_path / "rows")
    whole, rows = (
        {k: v for k, v in tree_hashes(tmp_path / n).items() if not k.startswith("report/")}
        for n in ("whole", "rows")
    )
    assert whole == rows


def test_batches_of_one_row_give_a_model_too(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrated, "rows_at_once", lambda *_: 1)
    report = run(recipe(GPTQ, calibration=text_source(tmp_path)), tiny("llama"), tmp_path / "out")
    assert all(x.tokens == 64 for x in layers(report).values() if x.skipped_reason is None)


def test_padded_rows_are_not_counted(tiny, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(6):
        (texts / f"{i}.txt").write_text("once upon a time " * (1 + i % 3))
    data = {"sources": [{"text": f"{texts}/*.txt"}], "samples": 4, "length": 32, "packing": "pad"}
    report = run(recipe(GPTQ, calibration=data), tiny("mixtral"), tmp_path / "out")
    assert report.calibration is not None
    real = report.calibration["tokens"]
    assert real < 4 * 32
    assert all(x.tokens == real for x in layers(report).values() if x.skipped_reason is None)
