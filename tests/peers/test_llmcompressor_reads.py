"""What real llm-compressor writes, read by us: weights and inputs as transformers computes them."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.checkpoint import Checkpoint
from compress.formats import FP8_CACHE, open_weights
from compress.quant.activations import quantize_inputs
from helpers import tiny_models
from helpers.in_transformers import load, load_folder, logits

pytestmark = pytest.mark.peers

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "peers" / "llmcompressor_run.py"
SIZES = {"hidden_size": 128, "intermediate_size": 256}  # blocks of 128 divide them


def run_peer(
    python: Path, source: Path, out: Path, scheme: str, *options: str, data: bool = False
) -> None:
    """data: it calibrates on rows."""
    rows = out.with_suffix(".rows")
    save_file({"ids": torch.randint(0, 256, (8, 32))}, rows)
    arguments = [str(python), str(SCRIPT), str(source), str(out), "--scheme", scheme, *options]
    arguments += ["--rows", str(rows)] if data or scheme == "FP8" else []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    subprocess.run(
        arguments, env=environment, cwd=out.parent, check=True, capture_output=True, timeout=600
    )


def ours(folder: Path, source: Path, dtype: torch.dtype) -> Any:
    """The source in transformers, with weights and rounded inputs as we read them."""
    weights = open_weights(Checkpoint.open(folder))
    model = load(source, dtype=dtype)
    model.load_state_dict({name: _whole(weights, name, dtype) for name in model.state_dict()})
    for linear in weights.spec.linears():
        inputs = weights.activation(linear.name)
        if inputs is not None:
            quantize_inputs(model.get_submodule(linear.name), inputs)
    return model


def _whole(weights: Any, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Rounded once, to the dtype that the model is in."""
    quantized = weights.quantized(name)
    tensor = weights.read(name) if quantized is None else quantized.dequantize(dtype)
    return torch.as_tensor(tensor, dtype=dtype)


@pytest.mark.parametrize("scheme", ["W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16"])
def test_logits_are_the_same(llmcompressor_python: Path, scheme: str, tmp_path: Path) -> None:
    source = tiny_models.make("llama", tmp_path / "source", **SIZES)
    run_peer(llmcompressor_python, source, tmp_path / "out", scheme)
    dtype = torch.bfloat16 if scheme == "NVFP4A16" else torch.float32
    found = logits(load(tmp_path / "out", dtype=dtype))
    assert torch.equal(found, logits(ours(tmp_path / "out", source, dtype)))


@pytest.mark.parametrize(
    ("scheme", "options", "read_as"),
    [
        ("W4A16", [], "int4 sym g128"),
        ("W4A16", ["--group-size", "32", "--round", "gptq"], "int4 sym g32"),
        ("W4A16", ["--channel"], "int4 sym channel"),
        ("W4A16_ASYM", ["--group-size", "64"], "int4 asym g64"),
        ("W4A16_ASYM", ["--group-size", "32", "--fold", "awq"], "int4 asym g32"),
        ("W8A16", [], "int8 sym g128"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_packed_weights_are_the_same(
    llmcompressor_python: Path, scheme: str, options: list[str], read_as: str, tmp_path: Path
) -> None:
    """As compressed-tensors itself decompresses them in transformers."""
    source = tiny_models.make("llama", tmp_path / "source", **SIZES)
    calibrated = "gptq" in options or "awq" in options
    run_peer(llmcompressor_python, source, tmp_path / "out", scheme, *options, data=calibrated)
    weights: Any = open_weights(Checkpoint.open(tmp_path / "out"))
    assert {weights.scheme(x.name).describe() for x in weights.spec.linears()} == {read_as}
    theirs = load_folder(tmp_path / "out", dequantize=True, dtype=torch.bfloat16).state_dict()
    for name, tensor in theirs.items():
        assert torch.equal(_whole(weights, name, torch.bfloat16), tensor), name


def test_a_cache(llmcompressor_python: Path, tmp_path: Path) -> None:
    """Its scales are those of the file, and every block has both."""
    source = tiny_models.make("llama", tmp_path / "source", **SIZES)
    run_peer(llmcompressor_python, source, tmp_path / "out", "FP8_DYNAMIC", "--cache", data=True)
    weights: Any = open_weights(Checkpoint.open(tmp_path / "out"))
    assert weights.kv_cache == FP8_CACHE
    raw = load_file(tmp_path / "out" / "model.safetensors")
    for block in weights.spec.blocks:
        found = weights.cache(block)
        for part, one in zip("kv", found, strict=True):
            stored = raw[f"model.layers.{block.index}.self_attn.{part}_scale"]
            assert one.scale.item() == stored.item() > 0
