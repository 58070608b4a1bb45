"""Types of mixtures as llama-quantize itself chooses them, and its files read as checkpoints."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, dequantize

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from compress.formats import open_weights
from compress.formats.gguf_weights import GgufWeights
from compress.quant.ggml_mixtures import MIXTURES
from helpers.exporters.gguf_files import planned, tiny, written
from helpers.exporters.gguf_readings import opened

pytestmark = pytest.mark.peers

WIDE = {"hidden_size": 256, "intermediate_size": 512}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "8 layers": ("llama", {**WIDE, "num_hidden_layers": 8}),
    "9 layers, tied, 4 queries a head": (
        "llama",
        {**WIDE, "num_hidden_layers": 9, "tied": True, "num_attention_heads": 8},
    ),
    "rows that fill no super-block": ("llama", {}),
    "8 experts": ("mixtral", {**WIDE, "num_local_experts": 8, "num_hidden_layers": 8}),
    "fused": ("phi3", {**WIDE, "num_hidden_layers": 8}),
    "17 layers": ("qwen2", {**WIDE, "num_hidden_layers": 17}),
    "turned": ("gpt2", {"n_embd": 256, "n_layer": 8}),
}


@pytest.mark.parametrize("case", MODELS)
def test_types_are_llamacpps_own(case: str, tools: Path, tmp_path: Path) -> None:
    family, sizes = MODELS[case]
    checkpoint = tiny(tmp_path / "model", family, dtype="bf16", **sizes)
    _, source = written(checkpoint, tmp_path, dtype="bf16")
    target = tmp_path / "theirs.gguf"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tools)}
    for name in MIXTURES:
        command = [str(tools / "llama-quantize"), str(source), str(target), name]
        subprocess.run(command, env=environment, capture_output=True, check=True)
        reader = GGUFReader(target)
        plan = planned(checkpoint, dtype=None, type=name)
        ours = dict(zip((x.name for x in plan.pieces), plan.kinds, strict=True))
        assert {x.name: x.tensor_type.name for x in reader.tensors} == ours, name
        field = reader.get_field("general.file_type")
        assert field is not None
        assert field.contents() == dict(plan.fields)["general.file_type"]


def quantized(tools: Path, source: Path, name: str) -> None:
    """The file at `source` becomes llama-quantize's of that name."""
    target = source.with_name("theirs")
    command = [str(tools / "llama-quantize"), str(source), str(target), name]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tools)}
    subprocess.run(command, env=environment, capture_output=True, check=True)
    target.replace(source)


@pytest.mark.parametrize("case", MODELS)
def test_its_files_are_read(case: str, tools: Path, tmp_path: Path) -> None:
    family, sizes = MODELS[case]
    checkpoint = tiny(tmp_path / "model", family, dtype="bf16", **sizes)
    for name in ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_S", "Q6_K", "IQ4_XS", "IQ4_NL", "Q5_1"):
        path = opened(checkpoint, tmp_path, dtype="bf16").checkpoint.path
        quantized(tools, path / "model.gguf", name)
        found = open_weights(Checkpoint.open(path))
        assert isinstance(found, GgufWeights)
        assert found.shapes == {x: checkpoint.shapes[x] for x in found.shapes}
        assert set(found.shapes) == set(checkpoint.shapes)
        stored = {x.name: x for x in GGUFReader(path / "model.gguf").tensors}
        for tensor, held in found.held.items():
            raw = stored[held.piece.name]
            values = torch.from_numpy(dequantize(raw.data, raw.tensor_type).copy()).float()
            values = values[held.place] if len(held.piece.shape) > 2 else values
            assert torch.equal(found.read(tensor).float(), held.piece.original(values)), tensor


def test_a_type_without_a_decoder_is_named(tools: Path, tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path / "model", dtype="bf16", **WIDE)
    path = opened(checkpoint, tmp_path, dtype="bf16").checkpoint.path
    quantized(tools, path / "model.gguf", "TQ1_0")
    with pytest.raises(CheckpointError, match="is of the type TQ1_0; F32, F16, BF16, Q4_0"):
        Checkpoint.open(path)
