"""Quantized linears in ONNX graphs: numbers of codes and scales, arithmetic of inputs."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from compress.formats import Weights, open_weights
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from compress_exporters.exporter import Options
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.codes import block_of, coded
from compress_exporters.onnx.graph.integers import as_integers
from compress_exporters.onnx.proof.checks import EXACT, require_form
from compress_exporters.onnx.proof.measuring import Error
from compress_exporters.onnx.proof.running import Runner
from compress_exporters.onnx.saving import MODEL, save
from compress_exporters.reference import Reference, text
from compress_exporters.table import EXPORTERS
from helpers import compressed_models, tiny_models
from helpers.exporters.onnx_graphs import built

G32 = QuantScheme(group_size=32)
CHANNEL = QuantScheme(granularity="channel", group_size=0)
# What -> (scheme, type of the codes as stored, operators).
WEIGHTS: dict[str, tuple[QuantScheme, ir.DataType]] = {
    "int4": (G32, ir.DataType.INT4),
    "int4 asymmetric": (replace(G32, symmetric=False), ir.DataType.UINT4),
    "int4, groups that do not divide": (QuantScheme(group_size=40), ir.DataType.INT4),
    "int4, groups of several blocks": (QuantScheme(group_size=48), ir.DataType.INT4),
    "int8, odd groups": (QuantScheme(bits=8, group_size=25, symmetric=False), ir.DataType.UINT8),
    "int2": (replace(G32, bits=2, symmetric=False), ir.DataType.UINT4),
    "int3": (replace(G32, bits=3), ir.DataType.INT4),
    "int5 asymmetric": (replace(G32, bits=5, symmetric=False), ir.DataType.UINT8),
    "int6 in rows": (replace(CHANNEL, bits=6), ir.DataType.INT8),
    "int4 in rows, asymmetric": (replace(CHANNEL, symmetric=False), ir.DataType.UINT4),
    "int4, one scale": (replace(CHANNEL, granularity="tensor"), ir.DataType.INT4),
    "int8": (PRESETS["W8A16"], ir.DataType.INT8),
    "FP8_DYNAMIC": (PRESETS["FP8_DYNAMIC"], ir.DataType.FLOAT8E4M3FN),
    "FP8_BLOCK": (
        replace(PRESETS["FP8_BLOCK"], group_size=16, activation=None),
        ir.DataType.FLOAT8E4M3FN,
    ),
    "NVFP4": (PRESETS["NVFP4A16"], ir.DataType.INT8),
}
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random model of a family, made once."""
    folder, made = tmp_path_factory.mktemp("sources"), dict[str, Path]()

    def model(family: str) -> Path:
        if family not in made:
            made[family] = tiny_models.make(family, folder / family)
        return made[family]

    return model


def source_of(folder: Path) -> Weights:
    found = open_weights(Checkpoint.open(folder))
    assert found.format.coded
    return found


def error_of(folder: Path, out: Path, options: Options | None = None) -> tuple[Build, Error]:
    """The graph of a checkpoint, and how far it is from our decoder on the same weights."""
    out.mkdir()
    build = built(folder, options)
    save(build, out, lambda *_: None)
    require_form(out / MODEL)
    source = source_of(folder)
    ids = text(source)
    want = Reference.load(source, inputs=build.rounds).logits(ids).numpy()
    return build, Error.of(Runner.open(out / MODEL, EXACT).whole(np.array([ids]))[0], want)


def operators(build: Build) -> Counter[str]:
    return Counter(node.op_type for node in build.graph.nodes)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_the_numbers_of_their_codes(
    name: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    scheme, dtype = WEIGHTS[name]
    folder = compressed_models.write(models("llama"), tmp_path / "model", scheme).folder
    build, error = error_of(folder, tmp_path / "out")
    assert error.largest < 1e-5
    assert operators(build)["DequantizeLinear"] == 14
    stored = build.graph.initializers["model.layers.1.mlp.down_proj.weight"]
    assert (stored.dtype, tuple(stored.shape or ())) == (dtype, (96, 64))
    assert not build.rounds


@pytest.mark.parametrize(
    ("group", "columns", "block"),
    [
        *((16, 64, 16), (24, 48, 8), (25, 100, 25), (32, 96, 32), (40, 80, 8), (48, 96, 16)),
        *((96, 192, 32), (512, 1024, 256), (64, 96, 32), (40, 64, 8), (40, 99, 40)),
    ],
)
def test_groups_are_blocks_of_powers_of_two(group: int, columns: int, block: int) -> None:
    assert block_of(group, columns) == block


@pytest.mark.parametrize(("group", "reason"), [(40, {"groups of 40"}), (48, set()), (96, set())])
def test_blocks_that_are_decoded_are_told(
    group: int, reason: set[str], models: Callable[[str], Path], tmp_path: Path
) -> None:
    scheme = QuantScheme(group_size=group)
    folder = compressed_models.write(models("llama"), tmp_path / "model", scheme).folder
    assert set(built(folder).unfused) == reason


def test_a_graph_in_the_making_has_no_numbers_of_weights(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    scheme, _ = WEIGHTS["int4 asymmetric"]
    folder = compressed_models.write(models("llama"), tmp_path / "model", scheme).folder
    build = built(folder)
    linears = [coded(build, linear) for linear in build.spec.linears()]
    assert len(linears) == 14
    assert all(x.beside.zero is not None and x.beside.zero.is_meta for x in linears)


@pytest.mark.parametrize("family", ["gpt2", "phi3", "gpt_neox", "opt", "qwen3_moe", "gemma2"])
def test_families(family: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = compressed_models.write(models(family), tmp_path / "model", G32).folder
    build, error = error_of(folder, tmp_path / "out")
    assert error.largest < 1e-5
    assert operators(build)["DequantizeLinear"] >= 8


@pytest.mark.parametrize("name", ["int4 asymmetric", "int8", "FP8_BLOCK"])
def test_scales_in_fp16(name: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = compressed_models.write(models("llama"), tmp_path / "model", WEIGHTS[name][0]).folder
    build, error = error_of(folder, tmp_path / "out", Options(dtype="fp16"))
    assert error.largest < 2e-2
    scale = build.graph.initializers["model.layers.1.mlp.down_proj.weight_scale"]
    assert scale.dtype == ir.DataType.FLOAT16


def test_columns_with_an_order_of_their_own(models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = compressed_models.write(
        models("llama"), tmp_path / "model", replace(G32, symmetric=False), act_order=True
    ).folder
    build, error = error_of(folder, tmp_path / "out")
    assert error.largest < 1e-5
    # One for q, k and v, which are in one order here, and one for gate and up.
    assert operators(build)["Gather"] == 1 + 2 * 4
    assert any("act-order" in note for note in build.notes)


def test_inputs_rounded_a_token_at_a_time(models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = compressed_models.write(models("llama"), tmp_path / "model", PRESETS["W8A8"]).folder
    build, error = error_of(folder, tmp_path / "out")
    assert build.rounds
    assert error.relative < 0.02
    found = operators(build)
    assert (found["MatMulInteger"], found["DequantizeLinear"]) == (14, 0)
    assert found["Round"] == 8  # of q, k and v together, of gate and up together


def test_inputs_rounded_beside_weights_in_groups(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    scheme = replace(G32, activation=ActivationScheme())
    folder = compressed_models.write(models("llama"), tmp_path / "model", scheme).folder
    build, error = error_of(folder, tmp_path / "out")
    assert build.rounds
    assert error.relative < 0.02
    assert (operators(build)["Round"], operators(build)["DequantizeLinear"]) == (8, 14)


@pytest.mark.parametrize("preset", ["W8A8_STATIC", "FP8"])
def test_inputs_with_a_fixed_scale(
    preset: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = compressed_models.write(models("llama"), tmp_path / "model", PRESETS[preset]).folder
    build, error = error_of(folder, tmp_path / "out")
    assert build.rounds
    assert error.relative < 0.02
    found = operators(build)
    assert (found["QuantizeLinear"], found["DequantizeLinear"]) == (8, 8 + 14)


def test_static_fp8_tells_what_the_session_needs(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    """ONNX Runtime does not open it otherwise on most processors, since it fuses a product that
    knows no fp8; where it does, it computes the same within what a rounding may turn."""
    folder = compressed_models.write(models("llama"), tmp_path / "model", PRESETS["FP8"]).folder
    source, out = source_of(folder), tmp_path / "out"
    out.mkdir()
    written = EXPORTERS["onnx"].plan(source, Options()).write(out, lambda *_: None)
    (note,) = [note for note in written.notes if "session" in note]
    assert note.endswith("session.disable_quant_qdq=1")
    assert EXPORTERS["onnx"].plan(source, Options()).verify(out).max_logit_error is not None
    ids = np.array([[1, 2, 3, 4]])
    exact = Runner.open(out / MODEL, EXACT).whole(ids)
    with suppress(CheckpointError):
        found = Runner.open(out / MODEL).whole(ids)
        assert np.abs(found - exact).max() < 0.02 * np.abs(exact).max()


def test_what_a_graph_does_not_say_is_noted(models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = compressed_models.write(
        models("llama"),
        tmp_path / "model",
        PRESETS["FP8_DYNAMIC"],
        kv_cache=ActivationScheme(type="float", granularity="tensor", dynamic=False),
    ).folder
    assert set(EXPORTERS["onnx"].plan(source_of(folder), Options()).notes) == {
        "keys and values are kept as they are, the source's scales (a-fp8 static) left out",
        "inputs that the source rounds at run time (a-fp8) stay as they are",
    }


def test_a_scale_that_fp16_lacks_is_refused(models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = compressed_models.write(models("llama"), tmp_path / "model", G32).folder
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale"][3, 1] = 1e-9
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    reason = r"up_proj.weight_scale has a scale of 9.97e-10, which"
    with pytest.raises(CheckpointError, match=reason):
        error_of(folder, tmp_path / "out", Options(dtype="fp16"))
    with pytest.raises(CheckpointError, match=reason):  # before anything is written, too
        EXPORTERS["onnx"].plan(source_of(folder), Options(dtype="fp16"))
    EXPORTERS["onnx"].plan(source_of(folder), Options())


@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_a_scale_of_inputs_that_fp16_lacks_is_refused(
    scale: float, models: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = compressed_models.write(models("llama"), tmp_path / "model", PRESETS["FP8"]).folder
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.input_scale"].fill_(scale)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    reason = r"^input model.layers.1.*/Mul.* has a scale of .*, which fp16 cannot hold; export wit"
    with pytest.raises(CheckpointError, match=reason):
        EXPORTERS["onnx"].plan(source_of(folder), Options(dtype="fp16"))
    EXPORTERS["onnx"].plan(source_of(folder), Options())


def test_a_check_reads_no_codes(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = compressed_models.write(models("llama"), tmp_path / "model", G32).folder
    source, read = source_of(folder), list[str]()
    real = Checkpoint.read
    monkeypatch.setattr(
        Checkpoint, "read", lambda self, name: (read.append(name), real(self, name))[1]
    )
    EXPORTERS["onnx"].plan(source, Options(dtype="fp16"))
    assert sum(name.endswith(".weight_scale") for name in read) >= 14
    assert not any(name.endswith((".weight_packed", "proj.weight")) for name in read)


@pytest.fixture
def outliers(models: Callable[[str], Path], tmp_path: Path) -> Path:
    """A bitsandbytes checkpoint whose weights have three fixed columns of large numbers."""
    scheme = PRESETS["LLM_INT8"]
    made = compressed_models.write(models("llama"), tmp_path / "model", scheme, fmt="bitsandbytes")
    columns, side = torch.tensor([3, 17, 40]), dict[str, torch.Tensor]()
    for tensor in made.quantized:
        side[tensor.removesuffix("weight") + "columns"] = columns.clone()
        side[tensor] = 5 * made.source[tensor][:, columns].contiguous()
    (made.folder / "compress_model").mkdir()
    save_file(side, made.folder / "compress_model" / "outliers.safetensors")
    return made.folder


def test_fixed_columns_stay_apart(outliers: Path, tmp_path: Path) -> None:
    build, error = error_of(outliers, tmp_path / "out")
    assert build.rounds
    assert build.notes == []
    assert error.relative < 0.02
    assert operators(build)["MatMulInteger"] == 14
    assert tuple(build.graph.initializers["model.layers.1.mlp.down_proj.weight"].shape or ()) == (
        93,
        64,
    )
    # Without the columns the logits are others: the test above sees them.
    source = source_of(outliers)
    ids = text(source)
    with_columns, without = (
        Reference.load(x, inputs=True).logits(ids) for x in (source, replace(source, side=None))
    )
    assert (with_columns - without).norm() > 0.1 * without.norm()


def test_a_linear_whose_columns_are_all_fixed_is_dense(outliers: Path, tmp_path: Path) -> None:
    path = outliers / "compress_model" / "outliers.safetensors"
    side, name = load_file(path), "model.layers.1.self_attn.o_proj."
    side[name + "columns"] = torch.arange(64)
    side[name + "weight"] = side[name + "weight"][:, :1].repeat(1, 64)
    save_file(side, path)
    build, error = error_of(outliers, tmp_path / "out")
    assert error.relative < 0.02
    assert operators(build)["MatMulInteger"] == 13


def test_a_linear_without_fixed_columns_reads_inputs_as_they_lie(
    outliers: Path, tmp_path: Path
) -> None:
    before = operators(built(outliers))["Gather"]
    path = outliers / "compress_model" / "outliers.safetensors"
    side, name = load_file(path), "model.layers.1.self_attn.o_proj."
    side[name + "columns"] = side[name + "columns"][:0].clone()
    side[name + "weight"] = side[name + "weight"][:, :0].clone()
    save_file(side, path)
    build, error = error_of(outliers, tmp_path / "out")
    assert error.relative < 0.02
    assert operators(build)["MatMulInteger"] == 14
    assert operators(build)["Gather"] == before - 2  # one for the fixed ones, one for the others


def test_a_graph_that_does_not_run_is_named(models: Callable[[str], Path], tmp_path: Path) -> None:
    save(built(models("llama")), tmp_path, lambda *_: None)
    with pytest.raises(CheckpointError, match=r"ONNX Runtime does not run the graph: .* out of"):
        Runner.open(tmp_path / MODEL).whole(np.array([[1 << 20]]))


def test_columns_found_at_run_time_are_noted(outliers: Path, tmp_path: Path) -> None:
    (outliers / "compress_model" / "outliers.safetensors").unlink()
    build, error = error_of(outliers, tmp_path / "out")
    assert error.largest < 1e-5
    assert build.notes == [
        "inputs that the source rounds at run time (a8 dynamic outliers) stay as they are"
    ]


def test_a_quantized_head(models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = compressed_models.write(
        models("llama"), tmp_path / "model", G32, head=replace(G32, symmetric=False)
    ).folder
    build, error = error_of(folder, tmp_path / "out")
    assert error.largest < 1e-5
    assert build.graph.initializers["lm_head.weight"].dtype == ir.DataType.UINT4


def test_default_sessions_are_within_two_percent(demo_model: Path, tmp_path: Path) -> None:
    """With ONNX Runtime's own rounding of inputs (accuracy level 4), on a trained model."""
    folder = compressed_models.write(demo_model, tmp_path / "model", G32).folder
    source, out = source_of(folder), tmp_path / "out"
    _, exact = error_of(folder, out)
    assert exact.largest < 1e-4
    ids = text(source)
    want = Reference.load(source).logits(ids).numpy()
    assert 0 < Error.of(Runner.open(out / MODEL).whole(np.array([ids]))[0], want).relative < 0.02


@pytest.mark.parametrize(
    ("dtype", "moved"),
    [
        (ir.DataType.INT4, 0),
        (ir.DataType.UINT4, 8),
        (ir.DataType.INT8, 0),
        (ir.DataType.UINT8, 128),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_integers_are_stored_as_onnx_reads_them(dtype: ir.DataType, moved: int) -> None:
    half = 8 if dtype.bitwidth == 4 else 128
    codes = torch.arange(-half, half - 1, dtype=torch.int8).reshape(-1, 5)  # an odd number
    found = as_integers(codes, dtype)
    assert found.dtype == dtype
    assert np.array_equal(found.numpy().astype(int), codes.numpy().astype(int) + moved)
    assert len(found.tobytes()) == -(-codes.numel() * dtype.bitwidth // 8)
