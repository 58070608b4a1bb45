"""Tiny random checkpoints of families in no architecture table, each odd in a way of its own."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from helpers import tiny_models

_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": tiny_models.VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
)
_GROUPED: Mapping[str, Any] = MappingProxyType({**_SIZES, "num_key_value_heads": 2, "head_dim": 16})
_GPT: Mapping[str, Any] = MappingProxyType(
    {
        **{k: v for k, v in _SIZES.items() if k.endswith(("_id", "vocab_size"))},
        "n_embd": 64,
        "n_inner": 96,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
    }
)
# Wide beside its state, or too much of a block is not recognised.
_STATES: Mapping[str, Any] = MappingProxyType(
    {
        **{key: size for key, size in _SIZES.items() if key != "num_attention_heads"},
        "hidden_size": 128,
        "state_size": 4,
        "conv_kernel": 2,
        "time_step_rank": 16,
    }
)
_EXPERTS: Mapping[str, Any] = MappingProxyType(
    {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
)

# Those that run without the weights of their linears.
RUNNING: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "bloom": {**_SIZES, "n_layer": 2, "n_head": 4},  # q, k and v in one linear
        "cohere": {**_GROUPED},  # tied, attention and MLP side by side
        "gpt_neo": {
            **_SIZES,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global"], 2]],
        },
        "stablelm": {**_GROUPED},
        "biogpt": {**_SIZES},  # a tied head by another name
        "gpt_neox_japanese": {**_SIZES},
        "lfm2": {**_GROUPED, "layer_types": ["conv", "full_attention"]},  # a convolution
        "phimoe": {**_GROUPED, **_EXPERTS, "num_local_experts": 4},  # a router that is a Linear
        "olmoe": {**_GROUPED, **_EXPERTS, "num_experts": 4},
        "laguna": {  # renamed by transformers when it is loaded
            **_GROUPED,
            **_EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
            "layer_types": ["full_attention", "full_attention"],
        },
        "jamba": {  # its mixers read `dt_proj.weight` in their forward
            **{key: size for key, size in _GROUPED.items() if key != "head_dim"},
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_dt_rank": 16,
            "mamba_d_state": 4,
        },
        "deepseek_v3": {
            **_SIZES,
            **_EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
        },
    }
)

# Those whose class reads weights of linears itself when it is loaded: which ones. Without them they
# run.
READING: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = MappingProxyType(
    {
        "mamba": (_STATES, ("dt_proj", "out_proj")),
        "falcon_mamba": (_STATES, ("dt_proj", "out_proj")),
        "mamba2": (
            {**_SIZES, "state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1},
            ("out_proj",),
        ),
        "nanochat": ({**_GROUPED}, ("o_proj",)),
        "gpt_bigcode": (_GPT, ("c_proj",)),
    }
)

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {**RUNNING, **{family: settings for family, (settings, _) in READING.items()}}
)


def make(family: str, folder: Path, **overrides: Any) -> Path:
    """Write a random checkpoint in fp32 with a small tokenizer into `folder` and return it.

    family: of SETTINGS, or another of transformers with all its keys in `overrides`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**SETTINGS.get(family, _SIZES), **overrides}
    config = AutoConfig.for_model(family, **settings)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 0.1)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    tiny_models.write_tokenizer(folder)
    return folder
