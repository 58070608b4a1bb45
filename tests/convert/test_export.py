"""Exports: nothing but the layout changes."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.arch.text_config import TEXT_CONFIGS
from compress.checkpoint import Checkpoint
from compress.convert.source import look
from compress.errors import CheckpointError, RecipeError
from compress.formats import FP8_CACHE
from compress.quant.scheme import PRESETS, QuantScheme
from compress.report.terminal.copied import as_blocks
from compress.verbs import Conversion, dry_export, export, export_table
from conftest import tree_hashes
from helpers.exporters.exports import ASYM, CT, SYM, assert_same_weights, copied, opened
from helpers.pages.copied import blocks_to_copy

# Experts are as other linears here, only more.
THERE = [
    pytest.param(to, scheme, family, id=f"{to}-{scheme.describe()}-{family}",
                 marks=pytest.mark.long if family == "mixtral" and to != "awq" else ())
    for to, scheme, family in product(
        ("gptq", "gptq_v2", "awq"), (SYM, ASYM), ("llama", "gpt2", "phi3", "mixtral"))
]  # fmt: skip


@pytest.mark.parametrize(("to", "scheme", "family"), THERE)
def test_there_and_back_is_bit_exact(
    compressed: Callable[..., Path], tmp_path: Path, family: str, scheme: QuantScheme, to: str
) -> None:
    source = compressed(family, scheme)
    export(source, to, tmp_path / "to")
    assert_same_weights(source, tmp_path / "to")
    export(tmp_path / "to", CT, tmp_path / "back")
    assert_same_weights(source, tmp_path / "back")
    linear = opened(source).spec.blocks[0].linears[0].tensor
    first, last = opened(source).quantized(linear), opened(tmp_path / "back").quantized(linear)
    assert first is not None
    assert last is not None
    assert first.scheme == last.scheme == scheme
    assert torch.equal(first.codes, last.codes)
    assert torch.equal(first.scale.half(), last.scale)


@pytest.mark.parametrize("key", TEXT_CONFIGS)
def test_a_block_in_the_decoders_own_config(
    key: str, compressed: Callable[..., Path], tmp_path: Path
) -> None:
    """It is read, and a result in another format does not have it any more."""
    source = copied(compressed(), tmp_path / "source")
    inner = json.loads((source / "config.json").read_text())
    assert inner["quantization_config"]
    (source / "config.json").write_text(json.dumps({"model_type": "some_vlm", key: inner}))
    assert opened(source).spec.text_config == (key,)
    export(source, "dense", tmp_path / "dense")
    written = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert "quantization_config" not in written | written[key]
    assert written[key]["model_type"] == inner["model_type"]
    assert_same_weights(source, tmp_path / "dense")


@pytest.mark.parametrize(
    ("preset", "to"),
    [
        ("FP8_BLOCK", "fp8-block"),
        ("FP8", "modelopt"),
        ("FP8_DYNAMIC", "modelopt"),
        ("W8A16", "modelopt"),
        ("W8A16", "gptq"),
        ("FP8", "fp8"),
        ("W8A8_STATIC", "dense"),
    ],
)
def test_eight_bits(compressed: Callable[..., Path], tmp_path: Path, preset: str, to: str) -> None:
    source = compressed(scheme=PRESETS[preset])
    export(source, to, tmp_path / "to")
    assert_same_weights(source, tmp_path / "to")
    if to != "dense":
        export(tmp_path / "to", CT, tmp_path / "back")
        assert_same_weights(source, tmp_path / "back")


def test_gptq_1_to_2_and_awq_to_gptq(compressed: Callable[..., Path], tmp_path: Path) -> None:
    for last, (to, then) in enumerate([("gptq", "gptq_v2"), ("awq", "gptq"), ("gptq_v2", "awq")]):
        export(compressed(scheme=ASYM), to, tmp_path / f"a{last}")
        export(tmp_path / f"a{last}", then, tmp_path / f"b{last}")
        assert_same_weights(tmp_path / f"a{last}", tmp_path / f"b{last}")


def test_symmetric_weights_on_their_way_through_awq(
    compressed: Callable[..., Path], tmp_path: Path
) -> None:
    """AWQ has no mark for them; zero points that are all 0 say the same."""
    exact = "scales go from bf16 to fp16, all of them exactly"
    there = export(compressed(scheme=SYM), "awq", tmp_path / "awq")
    first, second = there.notes
    assert first == exact
    assert second == (
        "awq has no mark for symmetric weights: 14 layers have zero points of 0 (8 in the file) and"
        " read back as asymmetric, with the same values"
    )
    assert {x.scheme.symmetric for x in look(opened(tmp_path / "awq")).layers.values()} == {True}
    back = export(tmp_path / "awq", "modelopt", tmp_path / "modelopt")  # symmetric throughout
    assert back.schemes == {"int4 sym g32": 14}
    assert back.notes == (
        "scales go from fp16 to fp32, all of them exactly",
        "all zero points are 0: 14 layers without a mark for it taken as symmetric",
    )
    assert_same_weights(compressed(scheme=SYM), tmp_path / "modelopt")
    asymmetric = export(compressed(scheme=ASYM), "awq", tmp_path / "asymmetric")
    assert asymmetric.notes == (exact,)
    assert look(opened(tmp_path / "asymmetric")).centred == 0


def test_what_is_said_of_scales(compressed: Callable[..., Path], tmp_path: Path) -> None:
    source = compressed(scheme=PRESETS["FP8"])
    assert dry_export(source, "modelopt").notes == (
        "scales go from bf16 to fp32, all of them exactly",
    )
    assert dry_export(source, "dense").notes == (
        "each weight is (code - zero) * scale, rounded once to bf16",
        "inputs are not quantized in a dense checkpoint",
    )
    export(source, "modelopt", tmp_path / "to")
    assert dry_export(tmp_path / "to", CT).notes == ()  # it takes scales as they come


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ("NVFP4A16", "vLLM on GPU is expected to take it, which was not tried; others do not, "),
        ("W4A16", "no runtime is known to take it: vLLM on GPU: "),
    ],
)
def test_an_export_that_nobody_opened_is_not_called_hopeless(
    compressed: Callable[..., Path], tmp_path: Path, scheme: str, said: str
) -> None:
    """Verdicts and the last lines say the same; nothing is refused that is expected above."""
    source = compressed(scheme=replace(PRESETS[scheme], group_size=16))
    report = export(source, "modelopt", tmp_path / "to")
    assert report.open_with == ()
    assert report.open_reason is not None
    assert report.open_reason.startswith(said)
    assert report.open_reason.endswith("; --to dense loads anywhere")
    for verdict in report.runtimes:
        assert (f"{verdict.runtime}: " in report.open_reason) == (verdict.verdict == "no")
    assert f"Open it\n  {said}" in export_table(report)
    assert dry_export(source, "dense").open_reason is None


def test_nvfp4_goes_to_modelopt_with_its_reciprocals(
    compressed: Callable[..., Path], tmp_path: Path
) -> None:
    source = compressed(scheme=PRESETS["NVFP4A16"])
    report = export(source, "modelopt", tmp_path / "to")
    assert any("reciprocals" in note for note in report.notes)
    export(tmp_path / "to", CT, tmp_path / "back")
    a, b, c = opened(source), opened(tmp_path / "to"), opened(tmp_path / "back")
    for linear in a.spec.linears():
        x, y, z = (w.quantized(linear.tensor) for w in (a, b, c))
        assert x is not None
        assert y is not None
        assert z is not None
        assert torch.equal(x.codes.view(torch.uint8), y.codes.view(torch.uint8))
        assert torch.allclose(x.dequantize(), y.dequantize(), rtol=1e-6, atol=0)
        assert torch.allclose(x.dequantize(), z.dequantize(), rtol=1e-6, atol=0)


def test_a_global_factor_is_not_inverted_on_the_way_to_dense(
    compressed: Callable[..., Path], tmp_path: Path
) -> None:
    export(compressed(scheme=PRESETS["NVFP4A16"]), "modelopt", tmp_path / "to")
    path = tmp_path / "to" / "model.safetensors"
    tensors = load_file(path)
    factors = {n: torch.tensor(0.3e-3) for n in tensors if n.endswith("weight_scale_2")}
    save_file(tensors | factors, path, metadata={"format": "pt"})
    export(tmp_path / "to", "dense", tmp_path / "dense")
    before, after = opened(tmp_path / "to"), Checkpoint.open(tmp_path / "dense")
    for linear in before.spec.linears():
        exact = before.quantized(linear.tensor)
        assert exact is not None
        assert exact.global_factor is not None
        assert torch.equal(exact.dequantize(torch.bfloat16), after.read(linear.tensor))
    export(tmp_path / "to", CT, tmp_path / "ct")
    scales = load_file(tmp_path / "ct" / "model.safetensors")
    wanted = torch.tensor([0.3e-3]).reciprocal()
    found = [t for n, t in scales.items() if n.endswith("weight_global_scale")]
    assert found
    assert all(torch.equal(scale, wanted) for scale in found)


def test_order_of_columns_goes_to_gptq(compressed: Callable[..., Path], tmp_path: Path) -> None:
    source = compressed(scheme=SYM, act_order=True)
    export(source, "gptq", tmp_path / "to")
    config = json.loads((tmp_path / "to" / "config.json").read_text())["quantization_config"]
    assert config["desc_act"] is True
    assert_same_weights(source, tmp_path / "to")
    export(tmp_path / "to", CT, tmp_path / "back")
    assert_same_weights(source, tmp_path / "back")
    with pytest.raises(
        RecipeError, match=r"q_proj does not fit into awq .*: gptq, gptq_v2, dense$"
    ):
        export(source, "awq", tmp_path / "awq")


def test_dense_is_the_original_again(compressed: Callable[..., Path], tmp_path: Path) -> None:
    source = compressed("gpt2", ASYM)
    report = export(source, "dense", tmp_path / "out")
    result = Checkpoint.open(tmp_path / "out")
    original = Checkpoint.open(source.parent / "source")
    assert result.shapes == original.shapes
    assert {i.dtype for i in result.tensors.values()} == {"BF16"}
    assert result.config == original.config
    assert "quantization_config" not in result.config
    assert report.result["bytes"] == result.file_bytes
    assert_same_weights(source, tmp_path / "out")


def test_what_lies_beside_the_weights(compressed: Callable[..., Path], tmp_path: Path) -> None:
    source = compressed()
    export(source, "gptq", tmp_path / "to")
    out = tmp_path / "to"
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"] == json.loads((out / "quantize_config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    report = json.loads((out / "report" / "report.json").read_text())
    assert report["command"] == "export"
    assert report["source"]["format"] == CT
    assert report["result"]["format"] == "gptq"
    assert report["schemes"] == {"int4 sym g32": 14}
    assert (
        "| model.layers.0.self_attn.q_proj | int4 sym g32 |"
        in (out / "report" / "report.md").read_text()
    )
    assert "compressed-tensors -> gptq" in (out / "report" / "report.md").read_text()
    page = out / "report" / "report.html"
    assert blocks_to_copy(page) == as_blocks(report["open_with"])
    assert f'from_pretrained("{out}")' in blocks_to_copy(page)[-1]
    assert "model.layers.0.self_attn.q_proj" in page.read_text()
    # What repeats the source's format for its loaders stays behind.
    back = export(out, CT, tmp_path / "back")
    assert not (tmp_path / "back" / "quantize_config.json").exists()
    assert back.skipped_files == [
        "report/ (about how the source was made)",
        "quantize_config.json (repeats the source's format)",
    ]
    assert not list(tmp_path.glob("*.partial"))


def test_two_exports_are_equal_and_shards_are_cut(
    compressed: Callable[..., Path], tmp_path: Path
) -> None:
    def weights(out: str) -> dict[str, str]:
        export(compressed(), "awq", tmp_path / out, options=Conversion(shard_size="40kB"))
        return {k: v for k, v in tree_hashes(tmp_path / out).items() if "report" not in k}

    assert weights("a") == weights("b")
    assert len(list((tmp_path / "a").glob("model-*.safetensors"))) > 1
    with pytest.raises(RecipeError, match="--shard-size is 'big'; it takes a size such as 5GB"):
        export(compressed(), "awq", tmp_path / "c", options=Conversion(shard_size="big"))


def test_scales_of_the_cache_go_where_they_can(
    compressed: Callable[..., Path], tmp_path: Path
) -> None:
    source = compressed(scheme=PRESETS["FP8"], kv_cache=FP8_CACHE)
    export(source, "modelopt", tmp_path / "to")
    export(tmp_path / "to", CT, tmp_path / "back")
    for folder in (tmp_path / "to", tmp_path / "back"):
        a, b = opened(source), opened(folder)
        assert b.kv_cache == FP8_CACHE
        for block in a.spec.blocks:
            x, y = a.cache(block), b.cache(block)
            assert x is not None
            assert y is not None
            assert [i.scale for i in x] == [i.scale for i in y]
    with pytest.raises(RecipeError) as caught:
        export(source, "fp8", tmp_path / "none")
    assert str(caught.value).endswith(
        "has scales of a key/value cache (a-fp8 static), which fp8 has no place for; formats that"
        " take all of this checkpoint: modelopt, dense"
    )
    report = export(source, "dense", tmp_path / "dense")
    assert report.notes[-1] == (
        "keys and values are not quantized in a dense checkpoint: their scales are left out"
    )
    assert not [x for x in Checkpoint.open(tmp_path / "dense").tensors if "_scale" in x]
    assert_same_weights(source, tmp_path / "dense")


def test_scales_of_a_cache_that_only_the_config_names(
    compressed: Callable[..., Path], tmp_path: Path
) -> None:
    source = copied(compressed(scheme=PRESETS["FP8"], kv_cache=FP8_CACHE), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    kept = {k: v for k, v in tensors.items() if not k.endswith((".k_scale", ".v_scale"))}
    save_file(kept, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        export(source, "modelopt", tmp_path / "out")
    assert str(caught.value) == (
        f"{source}: quantization_config has a kv_cache_scheme, but not every block has scales of"
        " its cache; download it again, or take that key out of config.json to convert the weights"
        " alone"
    )
    assert not (tmp_path / "out").exists()
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]["kv_cache_scheme"]
    (source / "config.json").write_text(json.dumps(config))
    export(source, "modelopt", tmp_path / "out")
    assert opened(tmp_path / "out").kv_cache is None


def test_scales_of_a_cache_that_the_config_does_not_name(
    compressed: Callable[..., Path], tmp_path: Path
) -> None:
    source = copied(compressed(scheme=PRESETS["FP8"], kv_cache=FP8_CACHE), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]["kv_cache_scheme"]
    (source / "config.json").write_text(json.dumps(config))
    report = export(source, "fp8", tmp_path / "out")
    assert report.notes[-1].startswith(
        "4 scales of a key/value cache left out (model.layers.0.self_attn.k_scale), as"
    )


@pytest.mark.parametrize("to", ["gptq", "dense"])
def test_threads_change_no_byte(compressed: Callable[..., Path], tmp_path: Path, to: str) -> None:
    source, threads = compressed(scheme=SYM), torch.get_num_threads()
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            export(source, to, tmp_path / f"{count}")
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    one, four = (tree_hashes(tmp_path / name) for name in ("1", "4"))
    weights = {name for name in one if name.endswith(".safetensors")}
    assert weights
    assert {name: one[name] for name in weights} == {name: four[name] for name in weights}
