"""Values in config.json that no model can be made of are refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.blocks.skeleton import Skeleton
from compress.checkpoint.reader import Checkpoint
from compress.errors import CheckpointError
from compress.formats import open_weights
from helpers import tiny_models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_models.make(name, folder / name) for name in ("llama", "qwen3_moe")}


def load(folder: Path) -> Skeleton:
    weights = open_weights(Checkpoint.open(folder))
    return Skeleton(weights.checkpoint.config, weights.spec, dtype=torch.float32)


@pytest.mark.parametrize(
    ("family", "key", "value", "words"),
    [
        ("llama", "hidden_act", "nonsense", "KeyError: 'nonsense'"),
        ("llama", "rope_scaling", {"type": "weird"}, "weird"),
        ("llama", "rms_norm_eps", "abc", "rms_norm_eps"),
        ("llama", "head_dim", 0, "ZeroDivisionError"),
        ("llama", "rope_parameters", "q", "rope_parameters"),
        ("llama", "bos_token_id", "x", "bos_token_id"),
        ("llama", "eos_token_id", [1, "a"], "eos_token_id"),
        ("llama", "num_hidden_layers", 10**12, "num_hidden_layers is 1000000000000"),
        ("qwen3_moe", "decoder_sparse_step", "x", "decoder_sparse_step is 'x'; it must be a whole"),
        ("qwen3_moe", "mlp_only_layers", 5, "mlp_only_layers is 5; it must be a list of block"),
        ("qwen3_moe", "mlp_only_layers", ["0"], "mlp_only_layers is ['0']; it must be a list of"),
        ("qwen3_moe", "num_experts_per_tok", 0, "num_experts_per_tok is 0; it must be 1 to 4"),
    ],
)
def test_one_line(
    family: str, key: str, value: Any, words: str, models: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((models[family] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    (tmp_path / "model.safetensors").symlink_to(models[family] / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert words in message
    assert "config.json" in message
    assert "\n" not in message
    assert len(message) < 400
