"""Configurations of all families, and what transformers computes of them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers import tiny_models

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.5],
        "long_factor": [2.0, 4.0],
        "partial_rotary_factor": 0.25,
    },
    "original_max_position_embeddings": 64,
}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


# What -> (family, options of tiny_models.make).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in (*tiny_models.TABLED, *tiny_models.LANDINGS)},
    **{f"{x} with biases": (x, {"bias": True}) for x in tiny_models.BIAS_FAMILIES},
    "deepseek_v3 with a latent of queries, biases and pairs alike": (
        "deepseek_v3",
        {"q_lora_rank": 24, "bias": True, "tied": True, "rms_norm_eps": 1e-3}
        | rope(
            rope_type="longrope",
            short_factor=[1.0, 1.0, 10.0, 2.5],
            long_factor=[1.0, 1.0, 10.0, 2.5],
            attention_factor=1.0,
            original_max_position_embeddings=32,
        ),
    ),
    "deepseek_v3 yarn in halves": (
        "deepseek_v3",
        {"rope_interleave": False, "v_head_dim": 24} | rope(**YARN, mscale=0.8, mscale_all_dim=0.6),
    ),
    "opt without biases": ("opt", {"bias": False}),
    "llama tied": ("llama", {"tied": True}),
    "gemma2 tied": ("gemma2", {"tied": True, "sliding_window": 5}),
    "gpt2 tied, scaled by layer": (
        "gpt2",
        {"tied": True, "scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
    ),
    "mistral with a window": ("mistral", {"sliding_window": 7}),
    "mixtral with a window": ("mixtral", {"sliding_window": 7}),
    "phi3 with a window": ("phi3", {"sliding_window": 7}),
    "qwen2 with windows behind the first": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3 with windows by type": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3_moe with a window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 6}),
    "qwen3_moe, dense and sparse": (
        "qwen3_moe",
        {"mlp_only_layers": [0], "num_hidden_layers": 3, "norm_topk_prob": False},
    ),
    "gemma3 with a window": ("gemma3_text", {"sliding_window": 5, "final_logit_softcapping": 2.0}),
    "gemma3 stretched": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "smollm3 with windows": (
        "smollm3",
        {"no_rope_layers": None, "num_hidden_layers": 4, "use_sliding_window": True}
        | {"sliding_window": 9},
    ),
    "gpt_neox one after the other": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox all rotated": ("gpt_neox", rope(partial_rotary_factor=1.0)),
    "phi3 half rotated": ("phi3", rope(partial_rotary_factor=0.5)),
    "phi3 longrope": ("phi3", LONGROPE),
    "llama linear": ("llama", rope(rope_type="linear", factor=4.0)),
    "llama llama3": ("llama", rope(**LLAMA3)),
    "llama yarn": ("llama", rope(**YARN)),
    "llama dynamic": ("llama", rope(rope_type="dynamic", factor=2.0)),
    "olmo2 yarn": ("olmo2", rope(**YARN, attention_factor=1.3, truncate=False)),
    "llama with every activation of its own": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "opt with gelu": ("opt", {"activation_function": "gelu"}),
}
# Those that keep keys and values of heads, which fused attention takes.
HEADS = {case: made for case, made in CASES.items() if made[0] != "deepseek_v3"}


def transformers_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()


def text(count: int = 45) -> Tensor:
    return torch.randint(1, tiny_models.VOCAB, (count,), generator=torch.Generator().manual_seed(1))


def plain_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """With a cache, one token after the other."""
    ids, cache = list(prompt), None
    with torch.no_grad():
        for _ in range(count):
            new = ids if cache is None else ids[-1:]
            out = model(torch.tensor([new]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            ids.append(int(out.logits[0, -1].argmax()))
    return ids
