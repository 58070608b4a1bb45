"""Codes in graphs for onnxruntime-genai: the numbers they mean, whatever their width and order."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import CheckpointError, RecipeError
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from compress.quant.tensor import QuantizedTensor
from compress_exporters.exporter import Options
from compress_exporters.genai.nbits import SIZES, WIDTHS, Layout, blocks, layout
from compress_exporters.onnx.saving import DATA, MODEL, save
from compress_exporters.reference import Reference, text
from helpers import compressed_models, tiny_models
from helpers.exporters.genai_graphs import EXACT, GENAI, built, opened, source, written

G32 = QuantScheme(group_size=32)
ROWS = QuantScheme(granularity="channel", group_size=0)
# What -> (scheme, how it is stored in 64 columns).
SCHEMES: dict[str, tuple[QuantScheme, Layout]] = {
    "int4": (G32, Layout(4, 32, False)),
    "int4 asymmetric": (replace(G32, symmetric=False), Layout(4, 32, True)),
    "int4 in groups of 48": (QuantScheme(group_size=48), Layout(4, 16, False)),
    "int4 in groups of 16": (replace(G32, group_size=16), Layout(4, 16, False)),
    "int4 in rows": (ROWS, Layout(4, 64, False)),
    "int4, one scale": (replace(ROWS, granularity="tensor"), Layout(4, 64, False)),
    "int2": (replace(G32, bits=2), Layout(2, 32, False)),
    "int3 asymmetric": (replace(G32, bits=3, symmetric=False), Layout(4, 32, True)),
    "int5": (replace(G32, bits=5), Layout(8, 32, False)),
    "int6 in rows, asymmetric": (replace(ROWS, bits=6, symmetric=False), Layout(8, 64, True)),
    "int7": (replace(G32, bits=7), Layout(8, 32, False)),
    "int8": (PRESETS["W8A16"], Layout(8, 64, False)),
    "int8 asymmetric": (PRESETS["W8A16_ASYM"], Layout(8, 64, True)),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("models") / "llama", dtype="fp32")


def error(model: Path, out: Path, options: Options = EXACT) -> float:
    """Largest difference to our decoder's logits."""
    reference, ids = Reference.load(source(model)), text(source(model))
    found = opened(model, out, options).whole(np.array([ids]))[0]
    return float(np.abs(found - reference.logits(ids).numpy()).max())


def nodes(out: Path, kind: str) -> list[dict[str, Any]]:
    """Attributes and inputs of all nodes of a kind."""
    model = onnx.load(out / MODEL, load_external_data=False)
    return [
        {"inputs": list(x.input), **{a.name: a.i for a in x.attribute}}
        for x in model.graph.node
        if x.op_type == kind
    ]


def unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [N, bytes] -> [N, bytes * 8 / bits]."""
    parts = [(codes >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).reshape(codes.shape[0], -1)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("columns", [64, 72, 200])
def test_blocks_mean_the_same_numbers(name: str, columns: int) -> None:
    scheme, _ = SCHEMES[name]
    weight = torch.randn(10, columns, generator=torch.Generator().manual_seed(0))
    tensor = compressed_models.round_weight(weight, scheme)
    how = layout(scheme, columns, "x")
    made = blocks(tensor, how)
    codes = unpacked(made.codes, how.bits).float()
    assert codes.shape == (10, how.count(columns) * how.size)
    assert made.codes.shape == (10, how.width(columns))
    zeros = torch.full(made.scales.shape, 1 << (how.bits - 1))
    if made.zeros is not None:
        assert made.zeros.shape == (10, how.zeros_width(columns))
        zeros = unpacked(made.zeros, how.bits)[:, : how.count(columns)]
    spread = [x.float().repeat_interleave(how.size, 1) for x in (zeros, made.scales)]
    values = ((codes - spread[0]) * spread[1])[:, :columns]
    assert torch.equal(values, tensor.dequantize())


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_of_every_scheme(name: str, llama: Path, tmp_path: Path) -> None:
    scheme, how = SCHEMES[name]
    assert layout(scheme, 64, "x") == how
    made = compressed_models.write(llama, tmp_path / "model", scheme, head=scheme)
    assert error(made.folder, tmp_path / "out") < 1e-5
    products = nodes(tmp_path / "out", "MatMulNBits")
    assert len(products) == 2 * 5 + 1
    assert {x["bits"] for x in products} == {how.bits}
    assert {len(x["inputs"]) for x in products} == {4 if how.zeros else 3}
    assert not nodes(tmp_path / "out", "MatMul")


@pytest.mark.parametrize("family", ["gpt2", "phi3", "gpt_neox", "qwen2", "mixtral", "gemma2"])
def test_logits_of_other_families(family: str, tmp_path: Path) -> None:
    """Transposed and fused weights, biases, experts."""
    folder = tiny_models.make(family, tmp_path / "source", dtype="fp32")
    scheme = replace(G32, symmetric=False)
    made = compressed_models.write(folder, tmp_path / "model", scheme)
    assert error(made.folder, tmp_path / "out") < 1e-5


def test_rows_of_each_head_are_put_in_order_where_they_are_written(tmp_path: Path) -> None:
    folder = tiny_models.make("gpt_neox", tmp_path / "source", dtype="fp32", rotary_pct=1.0)
    made = compressed_models.write(folder, tmp_path / "model", replace(G32, symmetric=False))
    assert error(made.folder, tmp_path / "out") < 1e-5
    assert not nodes(tmp_path / "out", "Split")


@pytest.mark.parametrize("act_order", [False, True], ids=["as it lies", "act-order"])
def test_a_fused_gate_and_up_are_two_products(act_order: bool, tmp_path: Path) -> None:
    folder = tiny_models.make("phi3", tmp_path / "source", dtype="fp32")
    scheme = replace(G32, symmetric=False)
    made = compressed_models.write(folder, tmp_path / "model", scheme, act_order=act_order)
    assert error(made.folder, tmp_path / "out") < 1e-5
    assert not nodes(tmp_path / "out", "Split")
    assert len(nodes(tmp_path / "out", "MatMulNBits")) == 2 * 5
    # Of the norms' outputs and of o's input; the order of down's is in the rows before it.
    assert len(nodes(tmp_path / "out", "Gather")) == 2 + 2 * 3 * act_order


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_act_order_is_folded(symmetric: bool, llama: Path, tmp_path: Path) -> None:
    """Never g_idx: with zero points ONNX Runtime multiplies wrong numbers and says nothing."""
    scheme = replace(G32, symmetric=symmetric)
    made = compressed_models.write(llama, tmp_path / "model", scheme, act_order=True)
    assert error(made.folder, tmp_path / "out") < 1e-5
    products = nodes(tmp_path / "out", "MatMulNBits")
    assert len(products) == 2 * 5
    assert all(len(x["inputs"]) == (3 if symmetric else 4) for x in products)
    # Of each block: one order for what reads a norm, one of o's; down's is in the rows before it.
    gathers = [x for x in nodes(tmp_path / "out", "Gather") if x.get("axis") == -1]
    assert len(gathers) == 2 * 3
    assert any("act-order" in line for line in built(made.folder).notes)


def test_one_matrix_only_of_what_is_stored_alike(llama: Path, tmp_path: Path) -> None:
    def choose(linear: Any) -> QuantScheme | None:
        return replace(G32, bits=8 if linear.role == "v" else 4)

    made = compressed_models.write(llama, tmp_path / "model", choose)
    assert built(made.folder).unfused == {
        "packed q/k/v": "their weights are stored in different ways"
    }
    assert error(made.folder, tmp_path / "out") < 1e-5
    assert len(nodes(tmp_path / "out", "MatMulNBits")) == 2 * 7


def test_a_layer_left_dense_stays_dense(llama: Path, tmp_path: Path) -> None:
    def choose(linear: Any) -> QuantScheme | None:
        return None if linear.role in ("q", "down") else G32

    made = compressed_models.write(llama, tmp_path / "model", choose)
    assert error(made.folder, tmp_path / "out") < 1e-5
    assert len(nodes(tmp_path / "out", "MatMul")) == 2 * 2 + 1


@pytest.mark.parametrize("name", ["int4", "int4 asymmetric", "int2", "int8", "int3 asymmetric"])
def test_an_embedding_is_looked_up_in_its_codes(name: str, tmp_path: Path) -> None:
    scheme = SCHEMES[name][0]
    folder = tiny_models.make("gemma2", tmp_path / "source", dtype="fp32")
    made = compressed_models.write(folder, tmp_path / "model", G32, embedding=scheme)
    assert error(made.folder, tmp_path / "out") < 1e-5
    (found,) = nodes(tmp_path / "out", "GatherBlockQuantized")
    assert found["bits"] == max(4, SCHEMES[name][1].bits)


def test_an_embedding_whose_rows_end_inside_a_block(tmp_path: Path) -> None:
    folder = tiny_models.make(
        "llama", tmp_path / "source", dtype="fp32", hidden_size=72, head_dim=16
    )
    made = compressed_models.write(folder, tmp_path / "model", G32, embedding=G32, head=G32)
    assert error(made.folder, tmp_path / "out") < 1e-5


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "apart"])
def test_head_and_embedding_with_the_same_codes_are_one(
    alike: bool, llama: Path, tmp_path: Path
) -> None:
    """As a tied pair becomes where both are rounded."""
    folder = Path(shutil.copytree(llama, tmp_path / "source"))
    tensors = load_file(folder / "model.safetensors")
    if alike:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    made = compressed_models.write(folder, tmp_path / "model", G32, head=G32, embedding=G32)
    assert error(made.folder, tmp_path / "out") < 1e-5
    names = [x for x in built(made.folder).graph.initializers if x.endswith(".codes")]
    assert ("lm_head.codes" in names) is not alike
    assert "model.embed_tokens.codes" in names


def test_outlier_columns_are_a_dense_product_beside(tmp_path: Path) -> None:
    scheme = PRESETS["LLM_INT8"]
    folder = tiny_models.make("llama", tmp_path / "source", dtype="fp16")
    made = compressed_models.write(folder, tmp_path / "model", scheme, fmt="bitsandbytes")
    columns, side = torch.tensor([3, 17, 40]), dict[str, torch.Tensor]()
    for tensor in made.quantized:
        fixed = columns[:0] if "layers.1.mlp.down" in tensor else columns
        side[tensor.removesuffix("weight") + "columns"] = fixed.clone()
        side[tensor] = 5 * made.source[tensor][:, fixed].contiguous()
    (made.folder / "compress_model").mkdir()
    save_file(side, made.folder / "compress_model" / "outliers.safetensors")
    assert error(made.folder, tmp_path / "out") < 1e-5
    build = built(made.folder)
    assert "outlier columns are a dense product beside the codes" in build.notes
    kept = [name for name in build.graph.initializers if ".down_proj.outliers" in name]
    assert kept == ["model.layers.0.mlp.down_proj.outliers.weight"]  # the other has none


@pytest.mark.parametrize("preset", ["W8A8", "W8A8_STATIC"])
def test_inputs_that_are_to_be_rounded_are_told(preset: str, llama: Path, tmp_path: Path) -> None:
    made = compressed_models.write(llama, tmp_path / "model", PRESETS[preset])
    assert error(made.folder, tmp_path / "out") < 1e-5
    for options, end in ((EXACT, "they stay as they are"), (Options(), "to int8 in blocks")):
        (line,) = (x for x in built(made.folder, options).notes if x.startswith("inputs are not"))
        assert line.endswith(end)


def test_codes_of_other_widths_are_told(llama: Path, tmp_path: Path) -> None:
    made = compressed_models.write(llama, tmp_path / "model", replace(G32, bits=3))
    assert "codes of 3 bits are stored in 4, and mean what they did" in built(made.folder).notes


@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "NVFP4A16"])
def test_floats_are_refused(preset: str, llama: Path, tmp_path: Path) -> None:
    made = compressed_models.write(llama, tmp_path / "model", PRESETS[preset])
    told = re.escape(PRESETS[preset].describe())
    with pytest.raises(RecipeError, match=f"^model.layers.* is {told}, and .*; export to onnx, or"):
        GENAI.plan(source(made.folder), Options())


def test_groups_that_blocks_do_not_divide_are_refused(llama: Path, tmp_path: Path) -> None:
    made = compressed_models.write(llama, tmp_path / "model", QuantScheme(group_size=24))
    message = r"has groups of 24 columns, and onnx-genai has blocks of 16, 32, 64, 128; take a mul"
    with pytest.raises(RecipeError, match=message):
        GENAI.plan(source(made.folder), Options())


def test_scales_that_fp16_lacks_are_refused(llama: Path, tmp_path: Path) -> None:
    made = compressed_models.write(llama, tmp_path / "model", G32)
    tensors = load_file(made.folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_scale"][3, 1] = 1e6
    save_file(tensors, made.folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj has a scale of 1e\+06, which fp16 cannot"):
        save(built(made.folder, Options("fp16")), tmp_path, lambda *_: None)
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale has a scale of 1e\+06, which"):
        GENAI.plan(source(made.folder), Options("fp16"))  # before anything is written, too


def test_files_are_as_small_as_codes_and_scales(llama: Path, tmp_path: Path) -> None:
    made = compressed_models.write(llama, tmp_path / "model", G32, head=G32, embedding=G32)
    written(made.folder, tmp_path / "out")
    weights = sum(x.codes.numel() // 2 + 4 * x.scale.numel() for x in made.quantized.values())
    rest = 4 * (5 * 64 + 2 * 128 * 8)  # norms, cosine and sine
    size = (tmp_path / "out" / DATA).stat().st_size
    assert weights < size <= weights + rest


def test_squares_and_act_order_mean_the_same_numbers() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    tensor = compressed_models.round_weight(weight, replace(G32, symmetric=False), act_order=True)
    assert tensor.g_idx is not None
    order = tensor.g_idx.long().argsort(stable=True)
    made = blocks(tensor, Layout(4, 32, True), order)
    assert torch.equal(unpacked(made.codes, 4), tensor.codes[:, order].to(torch.uint8) + 8 & 15)
    square = replace(G32, granularity="block")
    scale = torch.tensor([[0.5, 1.0], [2.0, 4.0]])
    codes = torch.randint(-8, 8, (40, 64), dtype=torch.int8)
    made = blocks(QuantizedTensor(codes, scale, None, None, square), layout(square, 64, "x"))
    assert torch.equal(made.scales, scale[[0] * 32 + [1] * 8])


def test_an_input_factor_multiplies_inputs(llama: Path, tmp_path: Path) -> None:
    made = compressed_models.write(llama, tmp_path / "model", G32, fmt="modelopt")
    tensors = load_file(made.folder / "model.safetensors")
    for name in list(tensors):
        if name.endswith("_proj.weight"):
            k = made.quantized[name].shape[1]
            tensors[name.replace(".weight", ".pre_quant_scale")] = torch.rand(k) + 0.5
    save_file(tensors, made.folder / "model.safetensors", metadata={"format": "pt"})
    assert error(made.folder, tmp_path / "out") < 1e-5


def test_tables_of_widths_and_sizes() -> None:
    assert sorted(SIZES, reverse=True) == list(SIZES)
    assert [layout(replace(G32, bits=bits), 64, "x").bits for bits in range(2, 9)] == [
        *(2, 4, 4, 8, 8, 8, 8)
    ]
    assert layout(G32, 64, "x", least=4).bits == 4
    assert set(WIDTHS) == {2, 4, 8}
    act = replace(G32, activation=ActivationScheme())
    assert layout(act, 64, "x") == layout(G32, 64, "x")
