"""Exports: nothing but the layout changes, and what a format cannot hold is refused before work."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import compressed_models
import tiny_models
from compress.checkpoint import Checkpoint, ShardWriter, disk
from compress.errors import CheckpointError, OutputError, RecipeError
from compress.formats import FP8_CACHE, CodedWeights, open_weights
from compress.pipeline import dry_export, export, export_table
from compress.quant.scheme import PRESETS, QuantScheme
from conftest import tree_hashes

SYM, ASYM = QuantScheme(group_size=32), QuantScheme(group_size=32, symmetric=False)
CT = "compressed-tensors"


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A compressed-tensors checkpoint of a family, made once."""
    made: dict[Any, Path] = {}

    def write(family: str = "llama", scheme: QuantScheme = SYM, **options: Any) -> Path:
        key = family, scheme, tuple(sorted(options))
        if key not in made:
            folder = tmp_path_factory.mktemp("export")
            dtype = options.pop("dtype", "bf16")
            source = tiny_models.make(family, folder / "source", tied=True, dtype=dtype)
            compressed_models.write(source, folder / "ct", scheme, **options)
            made[key] = folder / "ct"
        return made[key]

    return write


def copied(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder))


def opened(folder: Path) -> CodedWeights:
    weights = open_weights(Checkpoint.open(folder))
    assert isinstance(weights, CodedWeights)
    return weights


def assert_same_weights(before: Path, after: Path) -> None:
    """Every weight means the same numbers, and everything else is the same tensor."""
    a, b = opened(before), open_weights(Checkpoint.open(after))
    assert b.spec == a.spec
    for tensor in {x.tensor for x in a.spec.all_linears()}:
        x, y = a.quantized(tensor), b.quantized(tensor)
        if y is not None:
            assert x is not None
            assert torch.equal(x.dequantize(), y.dequantize()), tensor
        elif x is not None:  # dense: rounded once, to the dtype of the rest
            assert torch.equal(a.read(tensor).to(a.plain_dtype), b.read(tensor)), tensor
    plain = [
        n for n in a.checkpoint.tensors if n in b.checkpoint.tensors and ("norm" in n or "ln_" in n)
    ]
    assert plain
    assert all(torch.equal(a.read(name), b.read(name)) for name in plain)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "mixtral"])
@pytest.mark.parametrize("scheme", [SYM, ASYM], ids=QuantScheme.describe)
@pytest.mark.parametrize("to", ["gptq", "gptq_v2", "awq"])
def test_there_and_back_is_bit_exact(
    make: Callable[..., Path], tmp_path: Path, family: str, scheme: QuantScheme, to: str
) -> None:
    source = make(family, scheme)
    export(source, to, tmp_path / "to")
    assert_same_weights(source, tmp_path / "to")
    export(tmp_path / "to", CT, tmp_path / "back")
    assert_same_weights(source, tmp_path / "back")
    linear = opened(source).spec.blocks[0].linears[0].tensor
    first, last = opened(source).quantized(linear), opened(tmp_path / "back").quantized(linear)
    assert first is not None
    assert last is not None
    assert torch.equal(first.codes, last.codes)
    assert torch.equal(first.scale.half(), last.scale)


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
def test_eight_bits(make: Callable[..., Path], tmp_path: Path, preset: str, to: str) -> None:
    source = make(scheme=PRESETS[preset])
    export(source, to, tmp_path / "to")
    assert_same_weights(source, tmp_path / "to")
    if to != "dense":
        export(tmp_path / "to", CT, tmp_path / "back")
        assert_same_weights(source, tmp_path / "back")


def test_gptq_1_to_2_and_awq_to_gptq(make: Callable[..., Path], tmp_path: Path) -> None:
    for last, (to, then) in enumerate([("gptq", "gptq_v2"), ("awq", "gptq"), ("gptq_v2", "awq")]):
        export(make(scheme=ASYM), to, tmp_path / f"a{last}")
        export(tmp_path / f"a{last}", then, tmp_path / f"b{last}")
        assert_same_weights(tmp_path / f"a{last}", tmp_path / f"b{last}")


def test_nvfp4_goes_to_modelopt_with_its_reciprocals(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    source = make(scheme=PRESETS["NVFP4A16"])
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
    make: Callable[..., Path], tmp_path: Path
) -> None:
    export(make(scheme=PRESETS["NVFP4A16"]), "modelopt", tmp_path / "to")
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


def test_order_of_columns_goes_to_gptq(make: Callable[..., Path], tmp_path: Path) -> None:
    source = make(scheme=SYM, act_order=True)
    export(source, "gptq", tmp_path / "to")
    config = json.loads((tmp_path / "to" / "config.json").read_text())["quantization_config"]
    assert config["desc_act"] is True
    assert_same_weights(source, tmp_path / "to")
    export(tmp_path / "to", CT, tmp_path / "back")
    assert_same_weights(source, tmp_path / "back")
    with pytest.raises(RecipeError, match=r"q_proj does not fit into awq .*: compressed-tensors, "):
        export(source, "awq", tmp_path / "awq")


def test_dense_is_the_original_again(make: Callable[..., Path], tmp_path: Path) -> None:
    source = make("gpt2", ASYM)
    report = export(source, "dense", tmp_path / "out")
    result = Checkpoint.open(tmp_path / "out")
    original = Checkpoint.open(source.parent / "source")
    assert result.shapes == original.shapes
    assert {i.dtype for i in result.tensors.values()} == {"BF16"}
    assert result.config == original.config
    assert "quantization_config" not in result.config
    assert report.result["bytes"] == result.file_bytes
    assert_same_weights(source, tmp_path / "out")


def test_what_lies_beside_the_weights(make: Callable[..., Path], tmp_path: Path) -> None:
    source = make()
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
    # What repeats the source's format for its loaders stays behind.
    back = export(out, CT, tmp_path / "back")
    assert not (tmp_path / "back" / "quantize_config.json").exists()
    assert "quantize_config.json" in back.skipped_files
    assert not list(tmp_path.glob("*.partial"))


def test_two_exports_are_equal_and_shards_are_cut(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    def weights(out: str) -> dict[str, str]:
        export(make(), "awq", tmp_path / out, shard_size="40kB")
        return {k: v for k, v in tree_hashes(tmp_path / out).items() if "report" not in k}

    assert weights("a") == weights("b")
    assert len(list((tmp_path / "a").glob("model-*.safetensors"))) > 1
    with pytest.raises(RecipeError, match="--shard-size is 'big'; it takes a size such as 5GB"):
        export(make(), "awq", tmp_path / "c", shard_size="big")


def test_scales_of_the_cache_go_where_they_can(make: Callable[..., Path], tmp_path: Path) -> None:
    source = make(scheme=PRESETS["FP8"], kv_cache=FP8_CACHE)
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
    for to in ("fp8", "dense"):
        with pytest.raises(RecipeError) as caught:
            export(source, to, tmp_path / "none")
        assert str(caught.value).endswith(
            f"has scales of a key/value cache (a-fp8 static), which {to} has no place for; formats"
            " that hold them: compressed-tensors, modelopt"
        )


def test_scales_of_a_cache_that_the_config_does_not_name(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    source = copied(make(scheme=PRESETS["FP8"], kv_cache=FP8_CACHE), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]["kv_cache_scheme"]
    (source / "config.json").write_text(json.dumps(config))
    report = export(source, "fp8", tmp_path / "out")
    assert report.notes[-1].startswith(
        "4 scales of a key/value cache are left out (model.layers.0.self_attn.k_scale), as"
    )


def test_linears_that_runtimes_merge(tmp_path: Path) -> None:
    """A stranger's checkpoint may store them in different ways; what we write does not."""
    eight = QuantScheme(bits=8, group_size=32)
    source = tiny_models.make("llama", tmp_path / "source", tied=True)
    compressed_models.write(source, tmp_path / "ct", lambda x: eight if x.role == "k" else SYM)
    with pytest.raises(RecipeError) as caught:
        export(tmp_path / "ct", "gptq", tmp_path / "out")
    assert str(caught.value) == (
        "model.layers.0.self_attn.q_proj int4 sym g32, model.layers.0.self_attn.k_proj int8 sym"
        " g32, model.layers.0.self_attn.v_proj int4 sym g32; runtimes merge these into one matrix,"
        " so they need one scheme; export to dense"
    )
    assert not list(tmp_path.glob("out*"))
    export(tmp_path / "ct", "dense", tmp_path / "out")


def test_global_scales_of_merged_linears(make: Callable[..., Path], tmp_path: Path) -> None:
    source = copied(make(scheme=PRESETS["NVFP4A16"]), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight_global_scale"] *= 2
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RecipeError, match=r"v_proj nvfp4 with a global scale of \[8192.0\]; run"):
        export(source, "modelopt", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_zero_point_of_0_ends_an_export_to_gptq_1(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    """Found on the way, as zero points are read with their codes."""
    export(make(scheme=ASYM), "gptq_v2", tmp_path / "v2")
    tensors = load_file(tmp_path / "v2" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    tensors[f"{name}.qzeros"][0, 0] &= ~0xF
    save_file(tensors, tmp_path / "v2" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RecipeError) as caught:
        export(tmp_path / "v2", "gptq", tmp_path / "out")
    assert str(caught.value) == (
        f"{name}.weight: 1 of 192 zero points are 0, which GPTQ version 1 stores as -1 and loaders"
        " read differently; use format 'gptq_v2'"
    )
    assert not list(tmp_path.glob("out*"))
    export(tmp_path / "v2", "awq", tmp_path / "out")
    assert_same_weights(tmp_path / "v2", tmp_path / "out")


def test_refusals(make: Callable[..., Path], tmp_path: Path) -> None:
    def refused(source: Path, to: str, error: type[Exception] = RecipeError, **options: Any) -> str:
        with pytest.raises(error) as caught:
            export(source, to, tmp_path / "out", **options)
        assert "\n" not in str(caught.value)
        assert not list(tmp_path.glob("out*"))
        return str(caught.value)

    source = make()
    dense = refused(source.parent / "source", "gptq", CheckpointError)
    assert "is not quantized, so there is nothing to convert; use `compress-model run`" in dense
    assert "--to is 'gguf'; it is one of compressed-tensors, gptq," in refused(source, "gguf")
    assert "is in the format compressed-tensors already; copy the folder" in refused(source, CT)
    assert refused(source, "fp8").startswith(
        "model.layers.0.self_attn.q_proj does not fit into fp8 (nor 13 more layers): it holds"
        " 8-bit floats only, not int4 sym g32; use compressed-tensors, or quantize with scheme"
        " FP8_BLOCK; formats that hold all layers: compressed-tensors, gptq, gptq_v2, awq,"
    )
    assert "LLM.int8() only" in refused(source, "bitsandbytes")
    odd = make(scheme=QuantScheme(bits=5, group_size=32))
    assert "it holds 2, 3, 4 or 8 bits, not 5" in refused(odd, "gptq")
    assert "is inside the model's folder" in refused_into(source, source / "x")


def refused_into(source: Path, out: Path, **options: Any) -> str:
    with pytest.raises(OutputError) as caught:
        export(source, "gptq", out, **options)
    return str(caught.value)


def test_inexact_scales(make: Callable[..., Path], tmp_path: Path) -> None:
    source = make(scheme=SYM, dtype="fp32")
    with pytest.raises(RecipeError) as caught:
        export(source, "gptq", tmp_path / "out")
    assert "scales are not exact in float16 (the largest changes by 0.000" in str(caught.value)
    assert "add --round-scales" in str(caught.value)
    assert not list(tmp_path.glob("out*"))
    report = export(source, "gptq", tmp_path / "out", round_scales=True)
    assert "scales were rounded to F16" in report.notes[0]
    a, b = opened(source), opened(tmp_path / "out")
    for linear in a.spec.linears():
        x, y = a.quantized(linear.tensor), b.quantized(linear.tensor)
        assert x is not None
        assert y is not None
        assert torch.equal(x.codes, y.codes)
        assert torch.equal(x.scale.half(), y.scale)


def test_damaged_scales_are_found_before_work(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = copied(make(), tmp_path / "bad")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight_scale"
    tensors[name][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"tensor {name} has 1 scales that are not finite"):
        export(folder, "gptq", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_overwrite_replaces_results_of_exports_and_runs_only(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    export(make(), "gptq", tmp_path / "out")
    assert "is not empty; choose another folder or add --overwrite" in refused_into(
        make(), tmp_path / "out"
    )
    export(make(), "awq", tmp_path / "out", overwrite=True)
    assert opened(tmp_path / "out").format.name == "awq"
    (tmp_path / "out" / "mine.txt").write_text("x")
    assert "no result of an earlier run" in refused_into(make(), tmp_path / "out", overwrite=True)


def test_a_failure_leaves_nothing(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OutputError("disk full")

    monkeypatch.setattr(ShardWriter, "finish", full)
    assert refused_into(make(), tmp_path / "out") == "disk full"
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(disk, "remove_tree", full)  # as a kill would
    with pytest.raises(OutputError):
        export(make(), "gptq", tmp_path / "out")
    assert refused_into(make(), tmp_path / "out").endswith(
        "out.partial is left from a run that was stopped; remove it to start again"
    )


def test_a_dry_run_writes_nothing(make: Callable[..., Path], tmp_path: Path) -> None:
    plan = dry_export(make(), "gptq", tmp_path / "out")
    assert not list(tmp_path.iterdir())
    done = export(make(), "gptq", tmp_path / "out")
    assert (
        plan.result["bytes"] == done.result["bytes"] == Checkpoint.open(tmp_path / "out").file_bytes
    )
    assert "compressed-tensors -> gptq" in export_table(plan)
    with pytest.raises(OutputError, match="is not empty"):
        dry_export(make(), "gptq", tmp_path / "out")
