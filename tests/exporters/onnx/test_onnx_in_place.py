"""Graphs in the checkpoint's own folder, which point to its weights."""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from compress.formats import open_weights
from compress.quant.scheme import QuantScheme
from compress.verbs import ArtifactTarget, dry_artifact, export_artifact
from compress_exporters.exporter import Options
from compress_exporters.onnx.graph.linked import read_by
from compress_exporters.onnx.names import DATA, MODEL
from compress_exporters.onnx.proof.running import Array, Runner
from compress_exporters.reference import Reference, text
from helpers import compressed_models, tiny_models

FILE = "model.safetensors"
IDS = np.random.default_rng(0).integers(1, tiny_models.VOCAB, (1, 24))
TABLES = 2 * 128 * 8 * 4  # bytes of sine and cosine


def export(model: Path, dtype: Literal["fp32", "fp16"] = "fp32", *, verify: bool = False) -> Any:
    return export_artifact(
        model, ArtifactTarget("onnx", Options(dtype, in_place=True)), verify=verify
    )


def logits(folder: Path) -> Array:
    return Runner.open(folder / MODEL).whole(IDS)


def copied(model: Path, out: Path, dtype: Literal["fp32", "fp16"] = "fp32") -> Array:
    """Logits of the graph that has weights of its own."""
    export_artifact(model, ArtifactTarget("onnx", Options(dtype)), out, verify=False)
    return logits(out)


def weights(model: Path) -> dict[str, str]:
    files = sorted(model.glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def initializers(model: Path) -> dict[str, onnx.TensorProto]:
    graph = onnx.load(model / MODEL, load_external_data=False).graph
    return {tensor.name: tensor for tensor in graph.initializer}


def place(tensor: onnx.TensorProto) -> str | None:
    """The file that an initializer is in, None for the graph's own."""
    found = {entry.key: entry.value for entry in tensor.external_data}
    return found.get("location")


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(("llama", "fp32"), ("llama", "bf16"), ("llama", "fp16")),
        *(("gpt2", "fp32"), ("gemma2", "bf16"), ("phi3", "fp32"), ("qwen3_moe", "bf16")),
    ],
)
def test_weights_stay_where_they_are(family: str, dtype: Any, tmp_path: Path) -> None:
    model = tiny_models.make(family, tmp_path / "model", dtype=dtype, tied=family == "gemma2")
    before = weights(model)
    report = export(model)
    assert weights(model) == before
    large = {x.name for x in Checkpoint.open(model).tensors.values() if x.nbytes > 1024}
    found = initializers(model)
    assert {name for name, x in found.items() if place(x) == FILE} == large
    data = model / DATA
    assert (data.stat().st_size if data.exists() else 0) <= TABLES
    difference = np.abs(logits(model) - copied(model, tmp_path / "out"))
    assert difference.max() <= (0 if dtype == "fp32" else 1e-5)
    size = sum(x.nbytes for x in Checkpoint.open(model).tensors.values() if x.name in large)
    assert report.result["linked_bytes"] == size
    assert any(
        line.startswith(f"the graph points to {len(large)} weights (") for line in report.notes
    )


def test_numbers_of_16_bits_are_made_wide_in_the_graph(tmp_path: Path) -> None:
    model = tiny_models.make("llama", tmp_path / "model", dtype="bf16")
    export(model)
    types = {x.data_type for x in initializers(model).values() if place(x) == FILE}
    assert types == {onnx.TensorProto.BFLOAT16}
    nodes = onnx.load(model / MODEL, load_external_data=False).graph.node
    casts = [node for node in nodes if node.op_type == "Cast" and "proj" in node.name]
    assert len(casts) == 14
    assert all("Transpose" in node.input[0] for node in casts)


def test_a_table_is_looked_up_as_it_is(tmp_path: Path) -> None:
    """So that ONNX Runtime makes no copy of it."""
    model = tiny_models.make("llama", tmp_path / "model", dtype="bf16")
    export(model)
    nodes = onnx.load(model / MODEL, load_external_data=False).graph.node
    (found,) = (node for node in nodes if "model.embed_tokens.weight" in node.input)
    assert found.op_type == "Gather"


@pytest.mark.parametrize(("dtype", "code"), [("bf16", "BF16"), ("fp32", "F32")])
def test_fp16_takes_no_other_numbers(dtype: Any, code: str, tmp_path: Path) -> None:
    model = tiny_models.make("llama", tmp_path / "model", dtype=dtype)
    report = export(model, "fp16")
    assert report.result["linked_bytes"] == 0
    why = f"the checkpoint has them in {code}, the graph in fp16"
    assert f"16 dense weights written anew: {why}" in report.notes
    assert np.array_equal(logits(model), copied(model, tmp_path / "out", "fp16"))


def test_fp16_as_it_is(tmp_path: Path) -> None:
    model = tiny_models.make("llama", tmp_path / "model", dtype="fp16")
    report = export(model, "fp16", verify=True)
    assert report.exports[0].proof == "tokens"
    assert (model / DATA).stat().st_size == TABLES // 2
    assert np.array_equal(logits(model), copied(model, tmp_path / "out", "fp16"))


def test_codes_are_written_and_dense_weights_stay(tmp_path: Path) -> None:
    original = tiny_models.make("llama", tmp_path / "model", dtype="bf16")
    scheme = QuantScheme(group_size=32)
    model = compressed_models.write(original, tmp_path / "coded", scheme).folder
    before, report = weights(model), export(model, verify=True)
    assert weights(model) == before
    found = initializers(model)
    ends = {"model.embed_tokens.weight", "lm_head.weight"}
    assert {name for name, x in found.items() if place(x) == FILE} == ends
    assert report.exports[0].proof == "tokens"
    assert report.result["linked_bytes"] == 2 * tiny_models.VOCAB * 64 * 2
    assert place(found["model.layers.0.mlp.up_proj.weight"]) == DATA
    ids = text(open_weights(Checkpoint.open(model)))
    want = Reference.load(open_weights(Checkpoint.open(model))).logits(ids).numpy()
    got = Runner.open(model / MODEL, {"session.disable_quant_qdq": "1"}).whole(np.array([ids]))[0]
    assert np.abs(got - want).max() < 1e-5


def test_an_embedding_in_codes_is_written_decoded(tmp_path: Path) -> None:
    original = tiny_models.make("llama", tmp_path / "model", dtype="fp32")
    scheme = QuantScheme(group_size=32)
    model = compressed_models.write(
        original, tmp_path / "coded", scheme, embedding=scheme, head=scheme
    ).folder
    report = export(model, verify=True)
    assert report.result["linked_bytes"] == 0
    assert "the token embedding is written decoded" in report.notes
    assert read_by(model / MODEL) == {DATA}


def test_every_shard_is_read_from(tmp_path: Path) -> None:
    model = tiny_models.make("llama", tmp_path / "model", dtype="fp32", max_shard_size="150KB")
    files, report = Checkpoint.open(model).files, export(model, verify=True)
    assert len(files) > 2
    read = read_by(model / MODEL)
    assert read is not None
    assert read - {DATA} <= set(files)
    assert len(read - {DATA}) > 2
    assert any(line.endswith(", ".join(sorted(read - {DATA}))) for line in report.notes)
    assert np.array_equal(logits(model), copied(model, tmp_path / "out"))


def test_norms_with_an_offset_are_written(tmp_path: Path) -> None:
    """Of 320 numbers, as smaller ones are in the graph anyway."""
    model = tiny_models.make("gemma2", tmp_path / "model", dtype="fp32", tied=True, hidden_size=320)
    report = export(model)
    assert "9 dense weights written anew: what the norm adds to them is in them" in report.notes
    assert np.array_equal(logits(model), copied(model, tmp_path / "out"))


def test_numbers_at_odd_places_are_written(tmp_path: Path) -> None:
    """A header of any length is allowed."""
    model = tiny_models.make("llama", tmp_path / "model", dtype="fp32")
    raw = (model / FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    shifted = (length + 1).to_bytes(8, "little") + raw[8 : 8 + length] + b" " + raw[8 + length :]
    (model / FILE).write_bytes(shifted)
    report = export(model)
    why = "they begin at no multiple of a number's size"
    assert f"16 dense weights written anew: {why}" in report.notes
    assert report.result["linked_bytes"] == 0
    assert np.array_equal(logits(model), copied(model, tmp_path / "out"))


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_weights_that_are_no_numbers_are_refused(bad: float, tmp_path: Path) -> None:
    model = tiny_models.make("llama", tmp_path / "model", dtype="fp32")
    tensors = load_file(model / FILE)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = bad
    save_file(tensors, model / FILE, metadata={"format": "pt"})
    there = sorted(model.iterdir())
    with pytest.raises(CheckpointError, match=r"1\.mlp\.up_proj\.weight' in .* has .* at \[3, 4\]"):
        export(model)
    assert sorted(model.iterdir()) == there


def test_sizes_are_foretold(tmp_path: Path) -> None:
    model = tiny_models.make("llama", tmp_path / "model", dtype="bf16")
    plan = dry_artifact(model, ArtifactTarget("onnx", Options(in_place=True)))
    assert not list(model.glob("*onnx*"))
    report = export(model)
    assert plan.result["linked_bytes"] == report.result["linked_bytes"] > 0
    written = (model / DATA).stat().st_size
    assert written <= plan.result["bytes"] < written + 10_000


def test_a_graph_is_ours_by_its_own_word(tmp_path: Path) -> None:
    model = tiny_models.make("llama", tmp_path / "model", dtype="fp32")
    export(model)
    assert read_by(model / MODEL) == {FILE, DATA}
    (tmp_path / "strange.onnx").write_bytes(b"\xff" * 9)
    assert read_by(tmp_path / "strange.onnx") is None
    graph = onnx.load(model / MODEL, load_external_data=False)
    graph.producer_name = "pytorch"
    onnx.save(graph, tmp_path / "theirs.onnx")
    assert read_by(tmp_path / "theirs.onnx") is None
    with pytest.raises(CheckpointError, match=r"cannot read .*none.onnx: No such file"):
        read_by(tmp_path / "none.onnx")


def test_config_json_stays(tmp_path: Path) -> None:
    """Beside a copy it says nothing of codes; here it is the checkpoint's own."""
    original = tiny_models.make("llama", tmp_path / "model", dtype="fp32")
    scheme = QuantScheme(group_size=32)
    model = compressed_models.write(original, tmp_path / "coded", scheme).folder
    export(model)
    assert "quantization_config" in json.loads((model / "config.json").read_text())
