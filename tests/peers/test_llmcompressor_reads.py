"""What real llm-compressor writes, read by us: weights and inputs as transformers computes them."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tiny_models
from compress.blocks.activation import quantize_inputs
from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from in_transformers import load, logits

pytestmark = pytest.mark.peers

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "peers" / "llmcompressor_run.py"
SIZES = {"hidden_size": 128, "intermediate_size": 256}  # blocks of 128 divide them


def run_peer(python: Path, source: Path, out: Path, scheme: str) -> None:
    rows = out.with_suffix(".rows")
    save_file({"ids": torch.randint(0, 256, (8, 32))}, rows)
    arguments = [str(python), str(SCRIPT), str(source), str(out), "--scheme", scheme]
    arguments += ["--rows", str(rows)] if scheme == "FP8" else []
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
