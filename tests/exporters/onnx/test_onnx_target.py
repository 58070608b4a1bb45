"""The target onnx: what its proof finds, and what it says."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError, DependencyError
from compress.formats import open_weights
from compress.formats.weights import Weights
from compress.quant.scheme import PRESETS, QuantScheme
from compress_exporters import reference
from compress_exporters.exporter import Options
from compress_exporters.onnx.proof import checks
from compress_exporters.onnx.saving import DATA, MODEL
from compress_exporters.table import EXPORTERS
from helpers import compressed_models, tiny_models
from helpers.forward_cases import LONGROPE

ONNX = EXPORTERS["onnx"]


@pytest.fixture
def source(tmp_path: Path) -> Weights:
    return open_weights(
        Checkpoint.open(tiny_models.make("llama", tmp_path / "model", dtype="fp32"))
    )


@pytest.fixture
def folder(source: Weights, tmp_path: Path) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    ONNX.plan(source, Options()).write(out, lambda *_: None)
    return out


def test_what_is_written_is_told(source: Weights, tmp_path: Path) -> None:
    out, told = tmp_path / "out", []
    out.mkdir()
    written = ONNX.plan(source, Options()).write(out, lambda *step: told.append(step))
    assert set(written.files) == {path.name for path in out.iterdir()}
    assert {"model.onnx", "model.onnx.data", "config.json", "tokenizer.json"} <= set(written.files)
    assert written.fused == {"Attention": 2, "RotaryEmbedding": 4, "RMSNormalization": 5}
    assert [done for _, done, _ in told] == [*range(1, told[0][2] + 1)]
    size = ONNX.plan(source, Options()).size
    assert (out / DATA).stat().st_size <= size < (out / DATA).stat().st_size + 10_000


def test_two_exports_are_equal(source: Weights, folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    ONNX.plan(source, Options()).write(again, lambda *_: None)
    for name in (MODEL, DATA):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_proof_of_a_good_graph(source: Weights, folder: Path) -> None:
    proof = ONNX.plan(source, Options()).verify(folder)
    assert proof.level == "tokens"
    assert proof.max_logit_error is not None
    assert 0 < proof.max_logit_error < 1e-5
    assert "16 greedy tokens are the same" in proof.detail
    assert sum("padded" in line for line in proof.detail) == 2


@pytest.mark.parametrize(
    ("family", "options", "more", "tokens"),
    [
        ("llama", Options(max_context=9), {}, 8),
        ("llama", Options(max_context=1), {}, 1),
        ("gpt2", Options(), {"n_positions": 5}, 5),
        ("phi3", Options(), LONGROPE | {"original_max_position_embeddings": 16}, 13),
    ],
    ids=["9 positions", "one position", "learned", "longrope"],
)
def test_proofs_stay_within_the_positions(
    family: str, options: Options, more: dict[str, Any], tokens: int, tmp_path: Path
) -> None:
    model = tiny_models.make(family, tmp_path / "model", dtype="fp32", **more)
    source, out = open_weights(Checkpoint.open(model)), tmp_path / "out"
    out.mkdir()
    ONNX.plan(source, options).write(out, lambda *_: None)
    proof = ONNX.plan(source, options).verify(out)
    assert f"{tokens} greedy tokens are the same" in proof.detail


def test_tokens_that_differ_are_named() -> None:
    assert checks._greedy(None, 9) == ("tokens", "9 greedy tokens are the same")
    level, line = checks._greedy(reference.Apart(3, 17, 42, 0.0123), 9)
    assert level == "logits"
    assert line.startswith("3 greedy tokens are the same, then it chooses 17, and the weights 42, ")
    assert line.endswith("whose logit is 0.012 above")


def test_the_first_token_that_our_decoder_would_not_choose(source: Weights) -> None:
    decoder, prompt = reference.Reference.load(source), [5, 9]
    logits = decoder.logits(prompt)[-1]
    best, second = (int(x) for x in logits.topk(2).indices)
    by = float(logits[best] - logits[second])
    assert decoder.apart(prompt, [best], 0.0) is None
    assert decoder.apart(prompt, [second], 1.01 * by) is None
    assert decoder.apart(prompt, [second], 0.99 * by) == reference.Apart(0, second, best, by)
    third = int(decoder.logits([*prompt, best])[-1].argmin())
    found = decoder.apart(prompt, [best, third], 0.0)
    assert found is not None
    assert (found.number, found.chosen) == (1, third)


def test_default_sessions_are_held_to_rounded_inputs(demo_model: Path, tmp_path: Path) -> None:
    """With scales that fit no inputs, logits are far from those of inputs as they are."""
    scheme = PRESETS["W8A8_STATIC"]
    folder = compressed_models.write(demo_model, tmp_path / "model", scheme).folder
    coded, out = open_weights(Checkpoint.open(folder)), tmp_path / "out"
    out.mkdir()
    ONNX.plan(coded, Options()).write(out, lambda *_: None)
    proof = ONNX.plan(coded, Options()).verify(out)
    (line,) = [line for line in proof.detail if line.startswith("by default")]
    assert line.startswith("by default: logits within ")
    ids = reference.text(coded)
    as_they_are = reference.Reference.load(coded).logits(ids)
    rounded = reference.Reference.load(coded, inputs=True).logits(ids)
    assert (as_they_are - rounded).norm() > 0.1 * rounded.norm()


def test_no_file_says_how_the_source_was_quantized(tmp_path: Path) -> None:
    original = tiny_models.make("llama", tmp_path / "model", dtype="fp32")
    folder = compressed_models.write(
        original, tmp_path / "coded", QuantScheme(group_size=32)
    ).folder
    for name in ("quantize_config.json", "hf_quant_config.json"):
        (folder / name).write_text("{}")
    out = tmp_path / "out"
    out.mkdir()
    written = ONNX.plan(open_weights(Checkpoint.open(folder)), Options()).write(
        out, lambda *_: None
    )
    assert not [name for name in (*written.files, *os.listdir(out)) if "quant" in name]
    before, after = (json.loads((x / "config.json").read_text()) for x in (original, out))
    assert after == before


def spoil_weight(folder: Path) -> None:
    data = np.fromfile(folder / DATA, np.float32)
    data[data.size // 2] += 1.0
    data.tofile(folder / DATA)


def drop_rotation(folder: Path) -> None:
    rename(folder, lambda node: node.op_type == "RotaryEmbedding", "Identity", 1)


def see_all(folder: Path) -> None:
    """Of a mask, the part that says what is before what."""
    rename(folder, lambda node: node.op_type == "LessOrEqual", "GreaterOrEqual", 2)


def rename(folder: Path, which: Callable[[onnx.NodeProto], bool], kind: str, inputs: int) -> None:
    model = onnx.load(folder / MODEL, load_external_data=False)
    for node in model.graph.node:
        if which(node):
            node.op_type = kind
            del node.attribute[:]
            del node.input[inputs:]
    onnx.save(model, folder / MODEL)


@pytest.mark.parametrize("fault", [spoil_weight, drop_rotation, see_all])
def test_a_graph_that_computes_something_else_is_found(
    source: Weights, folder: Path, fault: Callable[[Path], None]
) -> None:
    fault(folder)
    with pytest.raises(
        CheckpointError, match=r"logits are not those of the weights: 48 tokens in one step, they"
    ):
        ONNX.plan(source, Options()).verify(folder)


def test_inputs_that_are_rounded_otherwise_are_found(source: Weights, tmp_path: Path) -> None:
    scheme = PRESETS["W8A8_STATIC"]
    written = compressed_models.write(source.checkpoint.path, tmp_path / "coded", scheme)
    coded, out = open_weights(Checkpoint.open(written.folder)), tmp_path / "out"
    out.mkdir()
    ONNX.plan(coded, Options()).write(out, lambda *_: None)
    model = onnx.load(out / MODEL, load_external_data=False)
    (step,) = {x.input[1] for x in model.graph.node if x.op_type == "QuantizeLinear"}
    (scale,) = (x for x in model.graph.initializer if x.name == step)
    scale.CopyFrom(onnx.numpy_helper.from_array(1.5 * onnx.numpy_helper.to_array(scale), step))
    onnx.save(model, out / MODEL)
    with pytest.raises(CheckpointError, match=r"one step, they differ by .*2% of their norm is al"):
        ONNX.plan(coded, Options()).verify(out)


def test_a_graph_that_is_none_is_found(source: Weights, folder: Path) -> None:
    rename(folder, lambda node: node.op_type == "RMSNormalization", "NoSuchOperator", 2)
    with pytest.raises(CheckpointError, match=r"model.onnx is no well-formed graph: .*NoSuchOper"):
        ONNX.plan(source, Options()).verify(folder)


@pytest.mark.parametrize(("free", "level"), [([0], "form"), ([10**9, 0], "loads")])
def test_little_memory_proves_less(
    source: Weights, folder: Path, monkeypatch: pytest.MonkeyPatch, free: list[int], level: str
) -> None:
    """free: before the graph is opened, and before the decoder is read."""
    found = iter(free)
    monkeypatch.setattr(reference, "available_bytes", lambda: next(found))
    proof = ONNX.plan(source, Options()).verify(folder)
    assert (proof.level, proof.max_logit_error) == (level, None)
    assert "too little memory is free" in proof.detail[0]


def test_missing_packages_are_named(source: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress_exporters.exporter.installed", lambda name: "ir" not in name)
    with pytest.raises(DependencyError, match=r"^onnx needs onnx_ir; .*compress-model\[onnx\]"):
        ONNX.plan(source, Options())


def test_onnx_runtime_reports_to_nobody(tmp_path: Path) -> None:
    """Where it does, it begins with files in the user's cache and in TMPDIR, at its import."""
    given = {k: v for k, v in os.environ.items() if not k.startswith(("ORT_", "XDG_"))}
    places = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    line = "import compress_exporters.onnx.proof.running"
    subprocess.run([sys.executable, "-c", line], env={**given, **places}, check=True)
    assert list(tmp_path.rglob("*")) == []
