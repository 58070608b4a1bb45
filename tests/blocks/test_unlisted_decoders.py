"""Decoders in no table run block by block too, whatever the shape of their forward."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.blocks.skeleton import Skeleton
from compress.checkpoint.reader import Checkpoint
from compress.formats import open_weights

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
# What makes each of them different from llama in a way that could go wrong unnoticed.
CASES: dict[str, dict[str, Any]] = {
    # opt-350m: norms behind the residual sums, projections around the blocks, a nested decoder
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "bloom": {"n_layer": 2, "n_head": 4},  # a norm behind the embedding, alibi
    "cohere": {},  # scaled logits, parallel attention and mlp
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},  # experts that transformers stacks
}


@pytest.mark.parametrize("family", CASES)
def test_streamed_logits_equal_the_whole_model(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **CASES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        model.save_pretrained(tmp_path)
        ids = torch.randint(1, 64, (2, 10))
        want = model(input_ids=ids).logits
    checkpoint = Checkpoint.open(tmp_path)
    weights = open_weights(checkpoint)
    assert weights.spec.family == "generic"
    skeleton = Skeleton(checkpoint.config, weights.spec, dtype=torch.float32)
    hidden, context = skeleton.embed(weights, ids), skeleton.context(ids)
    for index in range(2):
        hidden = skeleton.run_block(skeleton.load_block(weights, index), index, hidden, context)
    final = skeleton.final_hidden(weights, hidden).flatten(0, 1)
    torch.testing.assert_close(
        skeleton.logits(weights, final).unflatten(0, ids.shape), want, atol=1e-5, rtol=1e-5
    )
