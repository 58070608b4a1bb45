"""Exports that cannot be, or that fail: refused before the first byte, and nothing is left."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.checkpoint import Checkpoint, ShardWriter, disk
from compress.errors import CheckpointError, OutputError, RecipeError
from compress.quant.scheme import PRESETS, QuantScheme
from compress.verbs import Conversion, dry_export, export, export_table
from helpers import compressed_models, tiny_models
from helpers.exporters.exports import ASYM, CT, SYM, assert_same_weights, copied, opened


def test_linears_that_runtimes_merge(tmp_path: Path) -> None:
    """A stranger's checkpoint may store them in different ways; what we write does not."""
    eight = QuantScheme(bits=8, group_size=32)
    source = tiny_models.make("llama", tmp_path / "source", tied=True)
    compressed_models.write(source, tmp_path / "ct", lambda x: eight if x.role == "k" else SYM)
    with pytest.raises(RecipeError) as caught:
        export(tmp_path / "ct", "gptq", tmp_path / "out")
    assert str(caught.value) == (
        "model.layers.0.self_attn.q_proj int4 sym g32, model.layers.0.self_attn.k_proj int8 sym"
        " g32, model.layers.0.self_attn.v_proj int4 sym g32: runtimes merge these into one matrix,"
        " so they need one scheme; formats that take all of this checkpoint: dense"
    )
    assert not list(tmp_path.glob("out*"))
    export(tmp_path / "ct", "dense", tmp_path / "out")


def test_global_scales_of_merged_linears(compressed: Callable[..., Path], tmp_path: Path) -> None:
    source = copied(compressed(scheme=PRESETS["NVFP4A16"]), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight_global_scale"] *= 2
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RecipeError, match=r"v_proj nvfp4 with a global scale of \[8192.0\]: run"):
        export(source, "modelopt", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_zero_points_of_0_are_found_before_an_export_to_gptq_1(
    compressed: Callable[..., Path], tmp_path: Path
) -> None:
    export(compressed(scheme=ASYM), "gptq_v2", tmp_path / "v2")
    tensors = load_file(tmp_path / "v2" / "model.safetensors")
    for i in range(2):
        tensors[f"model.layers.{i}.mlp.up_proj.qzeros"][i, 0] &= ~0xF
    tensors["model.layers.1.mlp.down_proj.qzeros"] &= ~0xF0
    save_file(tensors, tmp_path / "v2" / "model.safetensors", metadata={"format": "pt"})
    for attempt in (dry_export, export):
        with pytest.raises(RecipeError) as caught:
            attempt(tmp_path / "v2", "gptq", tmp_path / "out")
        assert str(caught.value) == (
            "gptq has no place for zero points of 0 (version 1 stores -1, which loaders read"
            " differently), and there are some in model.layers.0.mlp.up_proj (1 of 192),"
            " model.layers.1.mlp.up_proj (1 of 192), model.layers.1.mlp.down_proj (24 of 192);"
            " formats that take all of this checkpoint: compressed-tensors, awq, dense"
        )
        assert not list(tmp_path.glob("out*"))
    export(tmp_path / "v2", "awq", tmp_path / "out")
    assert_same_weights(tmp_path / "v2", tmp_path / "out")


def test_refusals(compressed: Callable[..., Path], tmp_path: Path) -> None:
    def refused(source: Path, to: str, error: type[Exception] = RecipeError, **options: Any) -> str:
        with pytest.raises(error) as caught:
            export(source, to, tmp_path / "out", **options)
        assert "\n" not in str(caught.value)
        assert not list(tmp_path.glob("out*"))
        return str(caught.value)

    source = compressed()
    dense = refused(source.parent / "source", "gptq", CheckpointError)
    assert "is not quantized, so there is nothing to convert; use `compress-model run`" in dense
    assert "--to is 'gguf'; it is one of compressed-tensors, gptq," in refused(source, "gguf")
    assert "--to is 'gguf'" in refused(tmp_path / "nowhere", "gguf")  # the cheapest comes first
    assert "is in the format compressed-tensors already; copy the folder" in refused(source, CT)
    assert refused(source, "fp8").startswith(
        "model.layers.0.self_attn.q_proj does not fit into fp8 (nor do 13 more layers): it holds"
        " 8-bit floats only, not int4 sym g32; formats that take all of this checkpoint: gptq,"
    )
    assert "LLM.int8() only" in refused(source, "bitsandbytes")
    odd = compressed(scheme=QuantScheme(bits=5, group_size=32))
    assert "it holds 2, 3, 4 or 8 bits, not 5" in refused(odd, "gptq")
    assert "is inside the model's folder" in refused_into(source, source / "x")


def refused_into(source: Path, out: Path, **options: Any) -> str:
    with pytest.raises(OutputError) as caught:
        export(source, "gptq", out, **options)
    return str(caught.value)


def test_inexact_scales(compressed: Callable[..., Path], tmp_path: Path) -> None:
    source = compressed(scheme=SYM, dtype="fp32")
    with pytest.raises(RecipeError) as caught:
        export(source, "gptq", tmp_path / "out")
    assert "scales are not exact in float16 (the largest changes by 0.000" in str(caught.value)
    assert str(caught.value).endswith(
        " of its value); add --round-scales to round them, or take one of the formats that take all"
        " of this checkpoint: gptq_v2 (with --round-scales), awq (with --round-scales), modelopt,"
        " dense"
    )
    assert not list(tmp_path.glob("out*"))
    report = export(source, "gptq", tmp_path / "out", options=Conversion(round_scales=True))
    (note,) = report.notes
    assert note == (
        "scales go from fp32 to fp16: 1919 of 1920 are rounded, the largest change is 0.00048 of"
        " the scale"
    )
    a, b = opened(source), opened(tmp_path / "out")
    for linear in a.spec.linears():
        x, y = a.quantized(linear.tensor), b.quantized(linear.tensor)
        assert x is not None
        assert y is not None
        assert torch.equal(x.codes, y.codes)
        assert torch.equal(x.scale.half(), y.scale)


def test_damaged_scales_are_found_before_work(
    compressed: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copied(compressed(), tmp_path / "bad")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight_scale"
    tensors[name][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"tensor {name} has 1 scale that is 0 or not fin"):
        export(folder, "gptq", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_overwrite_replaces_results_of_exports_and_runs_only(
    compressed: Callable[..., Path], tmp_path: Path
) -> None:
    export(compressed(), "gptq", tmp_path / "out")
    assert "is not empty; choose another folder or add --overwrite" in refused_into(
        compressed(), tmp_path / "out"
    )
    export(compressed(), "awq", tmp_path / "out", overwrite=True)
    assert opened(tmp_path / "out").format.name == "awq"
    (tmp_path / "out" / "mine.txt").write_text("x")
    assert "no result of an earlier run" in refused_into(
        compressed(), tmp_path / "out", overwrite=True
    )


def test_a_failure_leaves_nothing(
    compressed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OutputError("disk full")

    monkeypatch.setattr(ShardWriter, "finish", full)
    assert refused_into(compressed(), tmp_path / "out") == "disk full"
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(disk, "remove_tree", full)  # as a kill would
    with pytest.raises(OutputError):
        export(compressed(), "gptq", tmp_path / "out")
    assert refused_into(compressed(), tmp_path / "out").endswith(
        "out.partial is left from a run that was stopped; remove it to start again"
    )


def test_a_dry_run_writes_nothing(compressed: Callable[..., Path], tmp_path: Path) -> None:
    plan = dry_export(compressed(), "gptq", tmp_path / "out")
    assert not list(tmp_path.iterdir())
    done = export(compressed(), "gptq", tmp_path / "out")
    assert (
        plan.result["bytes"] == done.result["bytes"] == Checkpoint.open(tmp_path / "out").file_bytes
    )
    assert "compressed-tensors -> gptq" in export_table(plan)
    with pytest.raises(OutputError, match="is not empty"):
        dry_export(compressed(), "gptq", tmp_path / "out")


def test_damaged_orders_of_columns(compressed: Callable[..., Path], tmp_path: Path) -> None:
    """Runtimes have one order for the matrix that they merge q, k and v into."""
    source = copied(compressed(scheme=SYM, act_order=True), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight_g_idx"

    def refused(g_idx: torch.Tensor, to: str = "gptq") -> str:
        save_file({**tensors, name: g_idx}, source / "model.safetensors")
        with pytest.raises((CheckpointError, RecipeError)) as caught:
            export(source, to, tmp_path / "out")
        assert not list(tmp_path.glob("out*"))
        return str(caught.value)

    one, g_idx = tensors[name].clone(), tensors[name]
    one[int((one == 0).nonzero()[0])] = 1
    damage = f"tensor {name} puts 31 columns into group 0, where 32 belong; it is damaged, so"
    assert refused(one).startswith(damage)
    assert refused(one, "dense").startswith(damage)
    assert refused(g_idx + 7) == f"tensor {name} holds groups 7 to 8; there are scales for 0 to 1"
    assert refused(g_idx.flip(0)) == (
        "model.layers.0.self_attn.q_proj.weight_g_idx and"
        " model.layers.0.self_attn.k_proj.weight_g_idx give columns different orders, and runtimes"
        " merge model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj,"
        " model.layers.0.self_attn.v_proj into one matrix with one order; formats that take all of"
        " this checkpoint: dense"
    )
    assert "give columns different orders" in refused(torch.arange(64, dtype=torch.int32) // 32)


def test_a_head_beside_a_config_that_says_tied(
    compressed: Callable[..., Path], tmp_path: Path
) -> None:
    source = copied(compressed(), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]

    def exported(head: torch.Tensor) -> tuple[Any, list[str]]:
        save_file({**tensors, "lm_head.weight": head}, source / "model.safetensors")
        report = export(source, "dense", tmp_path / "out", overwrite=True)
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        return config["tie_word_embeddings"], [x for x in report.notes if "tie_word" in x]

    same, notes = exported(embedding.clone())
    assert (same, notes) == (True, [])
    other, notes = exported(embedding.flip(0).contiguous())
    assert (other, notes) == (
        False,
        ["config.json now says tie_word_embeddings false, as the tensors do"],
    )


def test_parts_that_are_missing_are_found_before_work(
    compressed: Callable[..., Path], tmp_path: Path
) -> None:
    source = copied(compressed(), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    del tensors[f"{name}.weight_scale"]
    save_file(tensors, source / "model.safetensors")
    for to in ("gptq", "dense"):
        with pytest.raises(CheckpointError) as caught:
            export(source, to, tmp_path / "out")
        assert str(caught.value) == (
            f"{name}: int4 sym g32 needs tensor {name}.weight_scale, which is missing; the"
            " checkpoint is incomplete or its quantization_config is wrong"
        )
    assert not list(tmp_path.glob("out*"))
