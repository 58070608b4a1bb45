"""What `inspect` calls odd."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import compressed_models
import tiny_models
from compress.checkpoint.reader import Checkpoint
from compress.formats import CodedWeights, open_weights
from compress.formats.oddities import oddities
from compress.quant.scheme import PRESETS, QuantScheme

SYM, ASYM = QuantScheme(group_size=32), QuantScheme(group_size=32, symmetric=False)
Q = "model.layers.0.self_attn.q_proj"


def odd(folder: Path, change: Callable[[dict[str, Any]], Any] | None = None) -> list[str]:
    if change is not None:
        config = json.loads((folder / "config.json").read_text())
        change(config["quantization_config"])
        (folder / "config.json").write_text(json.dumps(config))
    weights = open_weights(Checkpoint.open(folder))
    assert isinstance(weights, CodedWeights)
    return oddities(weights)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_models.make("llama", tmp_path / "source", tied=True)


def write(source: Path, scheme: Any, fmt: str = "compressed-tensors") -> Path:
    return compressed_models.write(source, source.parent / fmt, scheme, fmt=fmt).folder


@pytest.mark.parametrize("fmt", ["compressed-tensors", "modelopt"])
def test_nothing_is_odd_about_what_we_write(source: Path, fmt: str) -> None:
    assert odd(write(source, SYM, fmt)) == []


def test_modules_that_the_config_forgets(source: Path) -> None:
    folder = write(source, lambda x: None if x.role == "o" else SYM)
    assert odd(folder, lambda block: block.update(ignore=[Q])) == [
        (
            "not quantized, but quantization_config does not ignore it:"
            " model.layers.0.self_attn.o_proj and 2 more"
        ),
        f"quantized, but quantization_config ignores it: {Q}",
        "stored in several ways, though runtimes fuse them: block 0 qkv",
    ]


def test_short_groups(source: Path) -> None:
    (line,) = odd(write(source, QuantScheme(group_size=64)))
    assert line == (
        "the last group is short: model.layers.0.mlp.down_proj (96 columns in groups of 64) and 1"
        " more"
    )


def test_fused_linears_that_differ(source: Path) -> None:
    folder = write(source, lambda x: ASYM if x.role == "k" else SYM)
    assert odd(folder) == [
        "stored in several ways, though runtimes fuse them: block 0 qkv and 1 more"
    ]


def test_what_runtimes_do_to_inputs(source: Path) -> None:
    """ModelOpt's W4A16_AWQ and its NVFP4 with quantized inputs."""
    module = "model.layers.0.self_attn.o_proj"
    folder = write(source, PRESETS["NVFP4A16"], "modelopt")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"{module}.input_scale": torch.tensor(0.5)}
    tensors |= {f"{module}.pre_quant_scale": torch.full((64,), 2.0)}
    save_file(tensors, folder / "model.safetensors")
    assert odd(folder) == [
        "inputs are multiplied by a pre_quant_scale, which only dense weights can take in",
        "runtimes round inputs to FP4 (NVFP4); here they stay as they are",
    ]
