"""What `inspect` calls odd."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.checkpoint.reader import Checkpoint
from compress.formats import open_coded
from compress.formats.oddities import oddities
from compress.quant.scheme import PRESETS, QuantScheme
from helpers import compressed_models, tiny_models

SYM, ASYM = QuantScheme(group_size=32), QuantScheme(group_size=32, symmetric=False)
Q = "model.layers.0.self_attn.q_proj"


def odd(folder: Path, change: Callable[[dict[str, Any]], Any] | None = None) -> list[str]:
    if change is not None:
        config = json.loads((folder / "config.json").read_text())
        change(config["quantization_config"])
        (folder / "config.json").write_text(json.dumps(config))
    weights = open_coded(Checkpoint.open(folder))
    assert weights is not None
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


def test_words_that_are_not_full(tmp_path: Path) -> None:
    source = tiny_models.make("llama", tmp_path / "source", tied=True, intermediate_size=88)
    scheme = QuantScheme(bits=5, granularity="channel", group_size=0, symmetric=False)
    down, gate = (f"model.layers.0.mlp.{name}_proj" for name in ("down", "gate"))
    padded = "are padded, which some kernels do not take"
    assert odd(write(source, scheme)) == [
        f"words of codes {padded}: {down} (64 x 88) and 1 more",
        f"words of zero points {padded}: {gate} (88 x 64) and 3 more",
    ]
    (line,) = odd(write(source, SYM))
    assert line.startswith("the last group is short")


def test_an_order_of_columns_that_the_config_denies(tmp_path: Path) -> None:
    source = tiny_models.make("llama", tmp_path / "source", tied=True, dtype="fp16")
    folder = compressed_models.write(source, tmp_path / "gptq", SYM, fmt="gptq").folder
    assert odd(folder) == []
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{Q}.g_idx"] = tensors[f"{Q}.g_idx"].flip(0)
    save_file(tensors, folder / "model.safetensors")
    assert odd(folder) == [f"g_idx gives columns an order though desc_act is false: {Q}"]
    rule = {r"+:.*\.q_proj": {"desc_act": True}}
    assert odd(folder, lambda block: block.update(dynamic=rule)) == []


@pytest.mark.parametrize("tied", [True, False])
def test_heads_that_loaders_leave_alone_need_not_be_listed(tmp_path: Path, tied: bool) -> None:
    source = tiny_models.make("llama", tmp_path / "source", tied=tied, dtype="fp16")
    for scheme, fmt, key in (
        (ASYM, "awq", "modules_to_not_convert"),
        (PRESETS["LLM_INT8"], "bitsandbytes", "llm_int8_skip_modules"),
        (PRESETS["FP8_BLOCK"], "fp8", "modules_to_not_convert"),
    ):
        folder = write(source, scheme, fmt)
        lists = {key: None, "ignored_layers": None}
        assert not any(
            "ignore" in x for x in odd(folder, lambda block, new=lists: block.update(new))
        )
    (line,) = odd(write(source, SYM), lambda block: block.update(ignore=[]))
    assert line.startswith("not quantized, but quantization_config does not ignore it: lm_head")
