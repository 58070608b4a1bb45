"""The target tensorrt: what it writes and says, its build command, and what its proof finds."""

import errno
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError, DependencyError, OutputError
from compress.formats import open_weights
from compress.formats.weights import Weights
from compress.quant.scheme import PRESETS
from compress_exporters.exporter import Options
from compress_exporters.onnx.proof.running import Runner
from compress_exporters.onnx.saving import DATA, MODEL
from compress_exporters.table import EXPORTERS
from compress_exporters.tensorrt import folding
from compress_exporters.tensorrt.build_notes import JSON, NOTES
from compress_exporters.tensorrt.profiles import profiles
from helpers import tiny_models
from helpers.exporters.tensorrt_graphs import G64, WIDE, positive
from helpers.forward_cases import CASES, rope, text, transformers_model

TENSORRT = EXPORTERS["tensorrt"]


def opened(model: Path) -> Weights:
    return open_weights(Checkpoint.open(model))


def exported(model: Path, out: Path, options: Options | None = None) -> Path:
    out.mkdir()
    TENSORRT.plan(opened(model), options or Options()).write(out, lambda *_: None)
    return out


@pytest.fixture
def source(tmp_path: Path) -> Weights:
    return opened(tiny_models.make("llama", tmp_path / "model", dtype="fp32"))


@pytest.fixture
def folder(source: Weights, tmp_path: Path) -> Path:
    return exported(source.checkpoint.path, tmp_path / "out")


@pytest.mark.parametrize(
    "case",
    [
        *("llama", "gemma2", "gpt2 tied, scaled by layer", "qwen3_moe with a window", "opt"),
        "deepseek_v3 with a latent of queries, biases and pairs alike",
    ],
)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    model = tiny_models.make(family, tmp_path / "model", **{"dtype": "fp32", **options})
    ids = text()[None]
    with torch.no_grad():
        want = transformers_model(model)(ids).logits.numpy()
    got = Runner.open(exported(model, tmp_path / "out") / MODEL).whole(ids.numpy())
    assert np.abs(got - want).max() < 1e-5


def test_what_is_written_is_told(source: Weights, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    written = TENSORRT.plan(source, Options()).write(out, lambda *_: None)
    assert set(written.files) == {path.name for path in out.iterdir()}
    assert {MODEL, DATA, JSON, NOTES, "config.json", "tokenizer.json"} <= set(written.files)
    assert written.fused == {"RotaryEmbedding": 4, "RMSNormalization": 5}
    why = "TensorRT's is for types of 16 bits (--dtype fp16), so it is spelled out"
    assert written.unfused == {"Attention": why}
    assert written.notes == ("no engine is in the folder; TENSORRT.md says how one is built",)
    assert TENSORRT.plan(source, Options()).notes == ()
    assert (out / DATA).stat().st_size <= TENSORRT.plan(source, Options()).size


def test_attention_is_one_operator_in_16_bits(source: Weights, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    written = TENSORRT.plan(source, Options(dtype="fp16")).write(out, lambda *_: None)
    assert written.fused == {"Attention": 2, "RotaryEmbedding": 4, "RMSNormalization": 5}
    assert not written.unfused


def test_soft_caps_are_told(tmp_path: Path) -> None:
    source, out = opened(tiny_models.make("gemma2", tmp_path / "model")), tmp_path / "out"
    out.mkdir()
    unfused = TENSORRT.plan(source, Options()).write(out, lambda *_: None).unfused
    assert unfused == {"Attention": "TensorRT's has no soft cap, so it is spelled out"}


def test_proof_of_a_good_graph(source: Weights, folder: Path) -> None:
    proof = TENSORRT.plan(source, Options()).verify(folder)
    assert proof.level == "tokens"
    assert proof.max_logit_error is not None
    assert 0 < proof.max_logit_error < 1e-5
    assert proof.detail[0] == "TensorRT's parser takes it, as far as 21 rules of the lint tell"
    assert "16 greedy tokens are the same" in proof.detail
    assert sum("padded" in line for line in proof.detail) == 2


@pytest.mark.parametrize(
    ("dtype", "preset"),
    [
        ("fp32", "W8A8_STATIC"),
        ("fp16", "FP8"),
        ("fp16", "NVFP4A16"),
        pytest.param("fp16", "W8A8_STATIC", marks=pytest.mark.long),
        pytest.param("fp32", "FP8", marks=pytest.mark.long),
        pytest.param("fp32", "NVFP4A16", marks=pytest.mark.long),
    ],
)
def test_proof_of_quantized_graphs(preset: str, dtype: Any, tmp_path: Path) -> None:
    dense = tiny_models.make("llama", tmp_path / "dense", dtype="fp32", **WIDE)
    model, options = positive(dense, tmp_path / "model", PRESETS[preset]), Options(dtype=dtype)
    source, out = opened(model), exported(model, tmp_path / "out", options)
    proof = TENSORRT.plan(source, options).verify(out)
    assert proof.level in ("logits", "tokens")
    assert ("ONNX's reference" in proof.detail[1]) == (preset == "NVFP4A16")
    assert not list(tmp_path.glob("*decoded*"))
    needed = {"W8A8_STATIC": None, "FP8": "8.9", "NVFP4A16": "10.0"}[preset]
    assert json.loads((out / JSON).read_text())["compute_capability"] == needed
    assert (f"capability {needed} or more" in (out / NOTES).read_text()) == (needed is not None)


@pytest.mark.parametrize("full", [False, True])
def test_decoding_for_the_proof_stays_in_the_folder(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a stopped export leaves nothing beside it."""
    real, places = folding.folded, list[Path]()

    def folded(model: Path, folder: Path) -> Path:
        places.append(folder.parent)
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(model, folder)

    dense = tiny_models.make("llama", tmp_path / "dense", dtype="fp32", **WIDE)
    model = positive(dense, tmp_path / "model", PRESETS["NVFP4A16"])
    out = exported(model, tmp_path / "out")
    monkeypatch.setattr(folding, "folded", folded)
    before = sorted(out.iterdir())
    says = r"cannot decode .*model.onnx for its proof: No space left on device; make room"
    with pytest.raises(OutputError, match=says) if full else nullcontext():
        TENSORRT.plan(opened(model), Options()).verify(out)
    assert places == [out]
    assert sorted(out.iterdir()) == before


def test_codes_of_4_bits_need_a_device_that_has_them(tmp_path: Path) -> None:
    dense = tiny_models.make("llama", tmp_path / "dense", dtype="fp32", **WIDE)
    out = exported(positive(dense, tmp_path / "model", G64), tmp_path / "out")
    assert json.loads((out / JSON).read_text())["compute_capability"] == "8.0"
    assert "a GPU of compute capability 8.0 or more" in (out / NOTES).read_text()


def spoil_weight(folder: Path) -> None:
    data = np.fromfile(folder / DATA, np.float32)
    data[data.size // 2] += 1.0
    data.tofile(folder / DATA)


def choose_one_key(folder: Path) -> None:
    model = onnx.load(folder / MODEL, load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "Softmax":
            node.op_type = "Hardmax"
    onnx.save(model, folder / MODEL)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (spoil_weight, "logits are not those of the weights"),
        (choose_one_key, r"rule operator, .*: Hardmax is none of .*\(and 1 more\)"),
    ],
)
def test_a_graph_that_is_wrong_is_found(
    source: Weights, folder: Path, fault: Callable[[Path], None], says: str
) -> None:
    fault(folder)
    with pytest.raises(CheckpointError, match=says):
        TENSORRT.plan(source, Options()).verify(folder)


def test_rotations_in_64_bits_are_refused(tmp_path: Path) -> None:
    model = tiny_models.make("llama", tmp_path / "model", **rope(rope_type="dynamic", factor=2.0))
    with pytest.raises(CheckpointError, match=r"'dynamic' computes its frequencies in 64 bits"):
        TENSORRT.plan(opened(model), Options())


def test_missing_packages_are_named(source: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress_exporters.exporter.installed", lambda name: "ir" not in name)
    with pytest.raises(DependencyError, match=r"^tensorrt needs onnx_ir; .*compress-model\[onnx\]"):
        TENSORRT.plan(source, Options())


def test_build_notes_are_of_this_graph(folder: Path) -> None:
    """Names, types and ranks are the graph's, in the notes and in the command."""
    facts = json.loads((folder / JSON).read_text())
    graph = onnx.load(folder / MODEL, load_external_data=False).graph
    for name, values in (("inputs", graph.input), ("outputs", graph.output)):
        for said, value in zip(facts[name], values, strict=True):
            tensor = value.type.tensor_type
            dims = [x.dim_value or x.dim_param for x in tensor.shape.dim]
            dtype = onnx.TensorProto.DataType.Name(tensor.elem_type)
            assert said == {"name": value.name, "dtype": dtype, "shape": dims}
    for profile, command in facts["trtexec"].items():
        assert command[0] == "trtexec"
        assert f"--onnx={MODEL}" in command
        for at, shapes in facts["profiles"][profile].items():
            assert list(shapes) == [value.name for value in graph.input]
            given = next(x for x in command if x.startswith(f"--{at}Shapes="))
            parts = dict(x.rsplit(":", 1) for x in given.partition("=")[2].split(","))
            assert parts == {k: "x".join(map(str, v)) for k, v in shapes.items()}
        assert " \\\n  ".join(command) in (folder / NOTES).read_text()


def test_shapes_of_profiles_run(folder: Path) -> None:
    """The least, usual and largest shapes are those of steps that the graph takes."""
    facts, runner = json.loads((folder / JSON).read_text()), Runner.open(folder / MODEL)
    for profile in facts["profiles"].values():
        for shapes in profile.values():
            given = {
                name: np.ones(shape, np.float32 if "past" in name else np.int64)
                for name, shape in shapes.items()
            }
            logits = runner.session.run(["logits"], given)[0]
            assert logits.shape == (*shapes["input_ids"], tiny_models.VOCAB)


@pytest.mark.parametrize("context", [1, 2, 3, 7, 128, 1024, 131072])
def test_no_profile_goes_beyond_the_context(context: int) -> None:
    for profile in profiles(context).values():
        steps = (profile.least, profile.usual, profile.most)
        assert max(step.new + step.past for step in steps) <= context
        for name in ("texts", "new", "past"):
            least, usual, most = (getattr(step, name) for step in steps)
            assert 0 <= least <= usual <= most
    assert profiles(context)["decode"].most.past == context - 1


def test_profiles_end_where_learned_positions_do(tmp_path: Path) -> None:
    model = tiny_models.make("gpt2", tmp_path / "model", n_positions=40)
    for asked, most in ((None, 40), (4096, 40), (24, 24)):
        out = tmp_path / str(asked)
        exported(model, out, Options(max_context=asked))
        shapes = json.loads((out / JSON).read_text())["profiles"]["decode"]["max"]
        assert shapes["attention_mask"][1] == most


def test_profiles_are_as_long_as_asked(source: Weights, tmp_path: Path) -> None:
    out = exported(source.checkpoint.path, tmp_path / "out", Options(max_context=40))
    shapes = json.loads((out / JSON).read_text())["profiles"]["decode"]["max"]
    assert shapes["attention_mask"] == [4, 40]
