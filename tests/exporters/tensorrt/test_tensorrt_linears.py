"""Quantized linears for TensorRT: types, blocks, numbers, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from compress.formats import open_weights
from compress.quant.scheme import PRESETS, QuantScheme
from compress_exporters.exporter import Options
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.proof.checks import EXACT
from compress_exporters.onnx.proof.measuring import Error
from compress_exporters.onnx.proof.running import Runner
from compress_exporters.onnx.saving import MODEL, save
from compress_exporters.reference import Reference, text
from compress_exporters.table import EXPORTERS
from compress_exporters.tensorrt.folding import folded
from compress_exporters.tensorrt.linears import notes
from compress_exporters.tensorrt.lint.lint import lint
from compress_exporters.tensorrt.lowering import TENSORRT
from helpers import compressed_models, tiny_models
from helpers.exporters.onnx_graphs import built
from helpers.exporters.tensorrt_graphs import COLUMNS, G64, WIDE, positive, with_outliers

ROWS = QuantScheme(granularity="channel", group_size=0)
SQUARES = replace(PRESETS["FP8_BLOCK"], group_size=64, activation=None)
INT4, INT8, FP8 = ir.DataType.INT4, ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN
# What -> (scheme, type of the codes, shape of the scales of a weight [256, 128]).
HELD: dict[str, tuple[QuantScheme, ir.DataType, tuple[int, ...]]] = {
    "int4 in blocks": (G64, INT4, (2, 256)),
    "int4, larger groups": (PRESETS["W4A16"], INT4, (1, 256)),
    "int3 in blocks": (replace(G64, bits=3), INT4, (2, 256)),
    "int4 in rows": (ROWS, INT4, (1, 256)),
    "int4, one scale": (replace(ROWS, granularity="tensor"), INT4, (1, 256)),
    "int6 in rows": (replace(ROWS, bits=6), INT8, (256,)),
    "int8 in blocks": (replace(G64, bits=8, activation=PRESETS["W8A8"].activation), INT8, (2, 256)),
    "W8A8": (PRESETS["W8A8"], INT8, (256,)),
    "W8A8_STATIC": (PRESETS["W8A8_STATIC"], INT8, (256,)),
    "FP8": (PRESETS["FP8"], FP8, ()),
    "FP8_DYNAMIC": (PRESETS["FP8_DYNAMIC"], FP8, (256,)),
    "FP8 in squares": (
        replace(PRESETS["FP8_BLOCK"], group_size=64, activation=None),
        FP8,
        (2, 256),
    ),
    "NVFP4": (PRESETS["NVFP4A16"], ir.DataType.FLOAT4E2M1, (8, 256)),
}
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wide") / "model"
    return tiny_models.make("llama", place, dtype="fp32", **WIDE)


def written(model: Path, out: Path, options: Options | None = None) -> Build:
    out.mkdir()
    build = built(model, options, TENSORRT)
    save(build, out, lambda *_: None)
    assert lint(out / MODEL) == ()
    return build


def error_of(model: Path, graph: Path, *, inputs: bool) -> Error:
    source = open_weights(Checkpoint.open(model))
    ids = text(source)
    want = Reference.load(source, inputs=inputs).logits(ids).numpy()
    return Error.of(Runner.open(graph, EXACT).whole(np.array([ids]))[0], want)


@pytest.mark.parametrize("case", HELD)
def test_codes_are_held_as_tensorrt_has_them(case: str, wide: Path, tmp_path: Path) -> None:
    """Logits are those of our decoder with codes and scales as they are."""
    scheme, dtype, shape = HELD[case]
    # A scale of fp32 that is rounded to fp16 would show.
    model = positive(wide, tmp_path / "model", scheme)
    build = written(model, tmp_path / "out")
    weights = build.graph.initializers
    assert weights[f"{UP}.weight"].dtype == dtype
    assert tuple(weights[f"{UP}.weight_scale"].shape or ()) == shape
    graph = tmp_path / "out" / MODEL
    if case == "NVFP4":
        (tmp_path / "folded").mkdir()
        graph = folded(graph, tmp_path / "folded")
    assert build.rounds == (case in ("W8A8_STATIC", "FP8"))
    error = error_of(model, graph, inputs=build.rounds)
    # An input that lies between two codes may fall to either.
    assert error.relative < (0.02 if build.rounds else 1e-5)


def test_rows_that_no_block_fills_have_eight_bits(tmp_path: Path) -> None:
    source = tiny_models.make("llama", tmp_path / "source", dtype="fp32")  # 96 columns
    model = positive(source, tmp_path / "model", ROWS)
    build = written(model, tmp_path / "out")
    down = build.graph.initializers["model.layers.0.mlp.down_proj.weight"]
    assert (down.dtype, build.graph.initializers[f"{UP}.weight"].dtype) == (INT8, INT4)
    why = "as no blocks of 64 fill their rows"
    assert f"2 layers have codes of 4 bits in 8-bit integers, {why}" in notes(build)
    assert error_of(model, tmp_path / "out" / MODEL, inputs=False).largest < 1e-5


def test_scales_below_zero_are_turned_in_eight_bits(wide: Path, tmp_path: Path) -> None:
    model = compressed_models.write(wide, tmp_path / "model", G64).folder
    build = written(model, tmp_path / "out")
    assert build.graph.initializers[f"{UP}.weight"].dtype == INT8
    (note,) = notes(build)
    assert note == (
        "14 layers have codes of 4 bits in 8-bit integers, as they have scales below 0 and TensorRT"
        " none; quantize with signs: positive, or with tensorrt in the recipe's export, to keep 4"
    )
    told = EXPORTERS["tensorrt"].plan(open_weights(Checkpoint.open(model)), Options()).notes
    assert told == (note,)
    assert error_of(model, tmp_path / "out" / MODEL, inputs=False).largest < 1e-5


def test_scales_below_zero_of_eight_bits_are_refused(wide: Path, tmp_path: Path) -> None:
    model = compressed_models.write(wide, tmp_path / "model", PRESETS["W8A16"]).folder
    reason = r"q_proj.weight has scales below 0, and TensorRT"
    with pytest.raises(CheckpointError, match=reason):
        written(model, tmp_path / "out")
    with pytest.raises(CheckpointError, match=reason):  # before anything is written, too
        EXPORTERS["tensorrt"].plan(open_weights(Checkpoint.open(model)), Options())


def test_eight_bits_without_the_least_code_are_turned(wide: Path, tmp_path: Path) -> None:
    model = compressed_models.write(wide, tmp_path / "model", PRESETS["W8A16"]).folder
    tensors = load_file(model / "model.safetensors")
    for name, values in tensors.items():
        if name.endswith(".weight_packed"):
            values.view(torch.uint8).clamp_(min=1)  # bytes count from -128
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    EXPORTERS["tensorrt"].plan(open_weights(Checkpoint.open(model)), Options())
    written(model, tmp_path / "out")
    assert error_of(model, tmp_path / "out" / MODEL, inputs=False).largest < 1e-5


def test_scales_that_fp16_lacks_are_refused(wide: Path, tmp_path: Path) -> None:
    for scheme, refused in ((G64, True), (PRESETS["NVFP4A16"], False)):
        model = positive(wide, tmp_path / scheme.describe(), scheme)
        tensors = load_file(model / "model.safetensors")
        part = "weight_global_scale" if scheme.is_fp4 else "weight_scale"
        tensors[f"{UP}.{part}"].fill_(1e9 if scheme.is_fp4 else 1e-9)
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        asked = open_weights(Checkpoint.open(model)), Options(dtype="fp16")
        if not refused:  # its scales stay in fp32
            EXPORTERS["tensorrt"].plan(*asked)
            continue
        with pytest.raises(CheckpointError, match=r"up_proj.weight_scale has a scale of .* which"):
            EXPORTERS["tensorrt"].plan(*asked)


@pytest.mark.parametrize("scheme", [PRESETS["NVFP4A16"], G64], ids=["NVFP4", "int4"])
def test_a_scale_of_zero_is_stored_as_one(scheme: QuantScheme, wide: Path, tmp_path: Path) -> None:
    model = positive(wide, tmp_path / "model", scheme)
    tensors = load_file(model / "model.safetensors")
    scale = tensors[f"{UP}.weight_scale"]
    plain = scale.view(torch.uint8) if scale.dtype == torch.float8_e4m3fn else scale
    plain[3, 1] = 0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    build = written(model, out)
    assert build.graph.initializers[f"{UP}.weight_scale"].const_value is not None
    graph = out / MODEL
    if scheme.is_fp4:
        (tmp_path / "folded").mkdir()
        graph = folded(graph, tmp_path / "folded")
    assert error_of(model, graph, inputs=False).largest < 1e-5


@pytest.mark.parametrize("fmt", ["gptq", "compressed-tensors"])
def test_columns_in_another_order_are_picked(fmt: str, tmp_path: Path) -> None:
    source, model = tmp_path / "source", tmp_path / "model"
    tiny_models.make("llama", source, dtype="fp16", **WIDE)
    compressed_models.write(source, model, G64, fmt=fmt, act_order=True)
    build = written(model, tmp_path / "out")
    gathers = sum(node.op_type == "Gather" for node in build.graph.nodes)
    assert gathers > 1  # the embedding's
    assert error_of(model, tmp_path / "out" / MODEL, inputs=False).largest < 1e-4


def test_fixed_columns_stay_apart(tmp_path: Path) -> None:
    source = tiny_models.make("llama", tmp_path / "source")
    model = with_outliers(source, tmp_path / "model")
    build = written(model, tmp_path / "out")
    weight = build.graph.initializers[f"{UP}.weight"].const_value
    assert weight is not None
    assert not weight.numpy()[list(COLUMNS)].any()
    assert tuple(build.graph.initializers[f"{UP}.outliers"].shape or ()) == (3, 96)
    assert error_of(model, tmp_path / "out" / MODEL, inputs=False).largest < 1e-4
    assert any("calibrated scales only" in note for note in build.notes)


REFUSED: dict[str, tuple[QuantScheme, str]] = {
    "zero points": (replace(G64, symmetric=False), "has zero points, and TensorRT quantizes sym"),
    "groups of 32": (replace(G64, group_size=32), "has groups of 32, and TensorRT's blocks have"),
    "broken groups": (replace(G64, group_size=96), "has 128 columns, which are no whole groups"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_block_holds_is_refused(case: str, wide: Path, tmp_path: Path) -> None:
    scheme, why = REFUSED[case]
    model = positive(wide, tmp_path / "model", scheme)
    with pytest.raises(CheckpointError, match=f"{why}.*; quantize with .* or export --to onnx$"):
        built(model, None, TENSORRT)


def test_fp16_scales_are_in_fp16(wide: Path, tmp_path: Path) -> None:
    """Strong typing: what DequantizeLinear makes is of the scale's type."""
    model = positive(wide, tmp_path / "model", G64)
    build = written(model, tmp_path / "out", Options(dtype="fp16"))
    assert build.graph.initializers[f"{UP}.weight_scale"].dtype == ir.DataType.FLOAT16
    assert error_of(model, tmp_path / "out" / MODEL, inputs=False).relative < 0.01


def test_fp4_in_fp16_is_cast_behind(wide: Path, tmp_path: Path) -> None:
    model = positive(wide, tmp_path / "model", PRESETS["NVFP4A16"])
    build = written(model, tmp_path / "out", Options(dtype="fp16"))
    casts = [x for x in build.graph.nodes if x.op_type == "Cast" and "proj" in str(x.name)]
    assert len(casts) == 14
