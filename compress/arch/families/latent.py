"""Families with latent attention (MLA): keys and values of all heads are made of one latent."""

from collections.abc import Mapping
from types import MappingProxyType

from compress.arch.families.family import Family, FoldRow, TensorRow
from compress.arch.families.llama_like import LLAMA_MLP, LLAMA_NORMS, LLAMA_OUTSIDE

# Queries come out of one linear, or of two with a latent between them. vLLM merges the two linears
# that read the stream where there are two.
LATENT_QUERIES = (
    TensorRow("q", "self_attn.q_proj", ("q", "hidden"), "", "attn_in", where=("query_rank", False)),
    TensorRow(
        "q_a",
        "self_attn.q_a_proj",
        ("query_rank", "hidden"),
        "",
        "attn_in",
        "qkv_a",
        bias="attention_bias",
        where=("query_rank", True),
    ),
    TensorRow("norm", "self_attn.q_a_layernorm", ("query_rank",), where=("query_rank", True)),
    TensorRow(
        "q_b",
        "self_attn.q_b_proj",
        ("q", "query_rank"),
        "",
        "query_latent",
        where=("query_rank", True),
    ),
)
# kv_a: the latent, and behind it the key that all heads share. kv_b: head by head what of a key
# has no position, and the value.
LATENT_ATTENTION = (
    *LATENT_QUERIES,
    TensorRow(
        "kv_a",
        "self_attn.kv_a_proj_with_mqa",
        ("latent", "hidden"),
        "",
        "attn_in",
        "qkv_a",
        bias="attention_bias",
    ),
    TensorRow("norm", "self_attn.kv_a_layernorm", ("rank",)),
    TensorRow("kv_b", "self_attn.kv_b_proj", ("unfolded", "rank"), "", "kv_latent"),
    TensorRow(
        "o", "self_attn.o_proj", ("hidden", "attended"), "", "attn_out", bias="attention_bias"
    ),
)
LATENT_FOLDS = (
    FoldRow("input_layernorm", ("q", "q_a", "kv_a"), "hidden"),
    FoldRow("self_attn.q_a_layernorm", ("q_b",), "query_rank"),
    FoldRow("self_attn.kv_a_layernorm", ("kv_b",), "rank"),
    FoldRow("self_attn.kv_b_proj", ("o",), "attended", skip=("nope",), by_head=True),
    FoldRow("post_attention_layernorm", ("gate", "up"), "hidden"),
    FoldRow("mlp.up_proj", ("down",), "mlp"),
)

LATENT: Mapping[str, Family] = MappingProxyType(
    {
        # Its dense blocks only; a mixture of its kind is read by names.
        "deepseek_v3": Family(
            attention=LLAMA_NORMS + LATENT_ATTENTION,
            dense=LLAMA_MLP,
            outside=LLAMA_OUTSIDE,
            anchor="self_attn.kv_b_proj",
            folds=LATENT_FOLDS,
            defaults=MappingProxyType(
                {
                    "kv_lora_rank": 512,
                    "q_lora_rank": 1536,
                    "qk_rope_head_dim": 64,
                    "qk_nope_head_dim": 128,
                    "v_head_dim": 128,
                }
            ),
            value_width=True,
            at_least=MappingProxyType({"first_k_dense_replace": "num_hidden_layers"}),
            latent=True,
            plain=True,
        ),
    }
)
