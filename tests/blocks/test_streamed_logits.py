"""A decoder run block by block gives the logits of the whole transformers model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.blocks.skeleton import Skeleton
from compress.checkpoint.reader import Checkpoint
from compress.formats import Weights, open_weights
from helpers import tiny_models

LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.5],
        "long_factor": [2.0, 4.0],
        "original_max_position_embeddings": 16,
        "partial_rotary_factor": 0.25,
    },
    "original_max_position_embeddings": 16,
}
# (family, dtype on disk, tied, bias switch, further config keys)
CASES: dict[str, tuple[str, tiny_models.Dtype, bool, bool | None, dict[str, Any]]] = {
    "llama": ("llama", "fp32", False, None, {}),
    "llama tied biased fp16": ("llama", "fp16", True, True, {}),
    "mistral window": ("mistral", "bf16", False, None, {"sliding_window": 7}),
    "qwen2 tied": ("qwen2", "bf16", True, None, {}),
    "qwen3 biased": ("qwen3", "bf16", False, True, {}),
    "phi3 partial rotary": (
        "phi3",
        "bf16",
        False,
        None,
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "phi3 longrope": ("phi3", "fp32", True, None, LONGROPE),
    "gpt2 tied": ("gpt2", "fp32", True, None, {}),
    "gpt2 untied": ("gpt2", "bf16", False, None, {}),
    "mixtral": ("mixtral", "bf16", False, None, {}),
    "qwen3_moe dense and sparse": (
        "qwen3_moe",
        "bf16",
        True,
        None,
        {"mlp_only_layers": [0], "num_hidden_layers": 3},
    ),
    "gemma2 tied": ("gemma2", "bf16", True, None, {}),
    "gemma3 tied": ("gemma3_text", "bf16", True, None, {"sliding_window": 7}),
    "gpt_neox": ("gpt_neox", "fp16", False, None, {}),
    "opt tied": ("opt", "fp32", True, None, {}),
    "opt without biases": ("opt", "fp32", True, False, {}),
    "olmo2": ("olmo2", "fp32", False, None, {}),
    "smollm3": ("smollm3", "bf16", True, None, {}),
    "granite (no table)": ("granite", "bf16", True, None, {}),
    "starcoder2 (no table)": ("starcoder2", "fp16", False, None, {}),
    "glm4 (no table)": ("glm4", "fp32", False, None, {}),
}


@pytest.fixture(scope="module", params=list(CASES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, dtype, tied, bias, keys = CASES[request.param]
    path = tmp_path_factory.mktemp("model")
    return tiny_models.make(family, path, dtype=dtype, tied=tied, bias=bias, **keys)


def open_model(folder: Path) -> tuple[Weights, Skeleton]:
    checkpoint = Checkpoint.open(folder)
    weights = open_weights(checkpoint)
    return weights, Skeleton(checkpoint.config, weights.spec, dtype=torch.float32)


def stream(weights: Weights, skeleton: Skeleton, ids: Tensor, mask: Tensor | None) -> Tensor:
    context = skeleton.context(ids, mask)
    hidden = skeleton.embed(weights, ids, mask)
    for index in range(len(weights.spec.blocks)):
        hidden = skeleton.run_block(skeleton.load_block(weights, index), index, hidden, context)
    final = skeleton.final_hidden(weights, hidden)
    return skeleton.logits(weights, final.flatten(0, 1)).unflatten(0, ids.shape)


def whole(folder: Path, ids: Tensor, mask: Tensor | None) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        attention = None if mask is None else mask.long()
        logits: Tensor = model(input_ids=ids, attention_mask=attention).logits
    return logits


@pytest.mark.parametrize("padded", [False, True])
def test_streamed_logits_equal_the_whole_model(folder: Path, padded: bool) -> None:
    weights, skeleton = open_model(folder)
    ids = torch.randint(1, tiny_models.VOCAB, (3, 24), generator=torch.Generator().manual_seed(1))
    mask = None
    if padded:
        mask = torch.ones(3, 24, dtype=torch.bool)
        mask[1, 15:] = False
        mask[2, 20:] = False
    got, want = stream(weights, skeleton, ids, mask), whole(folder, ids, mask)
    real = slice(None) if mask is None else mask
    assert got.dtype == torch.float32
    torch.testing.assert_close(got[real], want[real], atol=1e-5, rtol=1e-5)
