"""Families whose blocks are llama's: a norm before attention and one before a gated MLP."""

from collections.abc import Mapping
from types import MappingProxyType

from compress.arch.family import Family, FoldRow, Row

LLAMA_NORMS = (
    Row("norm", "input_layernorm", ("hidden",)),
    Row("norm", "post_attention_layernorm", ("hidden",)),
)
LLAMA_ATTENTION = (
    Row("q", "self_attn.q_proj", ("q", "hidden"), "", "attn_in", "qkv", bias="attention_bias"),
    Row("k", "self_attn.k_proj", ("kv", "hidden"), "", "attn_in", "qkv", bias="attention_bias"),
    Row("v", "self_attn.v_proj", ("kv", "hidden"), "", "attn_in", "qkv", bias="attention_bias"),
    Row("o", "self_attn.o_proj", ("hidden", "q"), "", "attn_out", bias="attention_bias"),
)
QWEN2_ATTENTION = (
    Row("q", "self_attn.q_proj", ("q", "hidden"), "", "attn_in", "qkv", bias=True),
    Row("k", "self_attn.k_proj", ("kv", "hidden"), "", "attn_in", "qkv", bias=True),
    Row("v", "self_attn.v_proj", ("kv", "hidden"), "", "attn_in", "qkv", bias=True),
    Row("o", "self_attn.o_proj", ("hidden", "q"), "", "attn_out"),
)
HEAD_NORMS = (
    Row("norm", "self_attn.q_norm", ("head_dim",)),
    Row("norm", "self_attn.k_norm", ("head_dim",)),
)
PHI3_ATTENTION = (
    Row("qkv", "self_attn.qkv_proj", ("qkv", "hidden"), "", "attn_in"),
    Row("o", "self_attn.o_proj", ("hidden", "q"), "", "attn_out"),
)
LLAMA_MLP = (
    Row("gate", "mlp.gate_proj", ("mlp", "hidden"), "", "mlp_in", "gate_up", bias="mlp_bias"),
    Row("up", "mlp.up_proj", ("mlp", "hidden"), "", "mlp_in", "gate_up", bias="mlp_bias"),
    Row("down", "mlp.down_proj", ("hidden", "mlp"), "", "mlp_mid", bias="mlp_bias"),
)
PHI3_MLP = (
    Row("gate_up", "mlp.gate_up_proj", ("mlp2", "hidden"), "", "mlp_in"),
    Row("down", "mlp.down_proj", ("hidden", "mlp"), "", "mlp_mid"),
)
LLAMA_OUTSIDE = (
    Row("embedding", "embed_tokens", ("vocab", "hidden")),
    Row("norm", "norm", ("hidden",)),
)
LLAMA_FOLDS = (
    FoldRow("input_layernorm", ("q", "k", "v"), "hidden"),
    FoldRow("self_attn.v_proj", ("o",), "kv"),
    FoldRow("post_attention_layernorm", ("gate", "up"), "hidden"),
    FoldRow("mlp.up_proj", ("down",), "mlp"),
)
PHI3_FOLDS = (
    FoldRow("input_layernorm", ("qkv",), "hidden"),
    FoldRow("self_attn.qkv_proj", ("o",), "kv", skip=("q", "kv")),
    FoldRow("post_attention_layernorm", ("gate_up",), "hidden"),
    FoldRow("mlp.gate_up_proj", ("down",), "mlp", skip=("mlp",)),
)

LLAMA = Family(
    attention=LLAMA_NORMS + LLAMA_ATTENTION,
    dense=LLAMA_MLP,
    outside=LLAMA_OUTSIDE,
    anchor="self_attn.q_proj",
    folds=LLAMA_FOLDS,
)

LLAMA_LIKE: Mapping[str, Family] = MappingProxyType(
    {
        "llama": LLAMA,
        "mistral": Family(
            attention=LLAMA_NORMS + LLAMA_ATTENTION,
            dense=LLAMA_MLP,
            outside=LLAMA_OUTSIDE,
            anchor="self_attn.q_proj",
            folds=LLAMA_FOLDS,
            defaults=MappingProxyType({"num_key_value_heads": 8}),
        ),
        "qwen2": Family(
            attention=LLAMA_NORMS + QWEN2_ATTENTION,
            dense=LLAMA_MLP,
            outside=LLAMA_OUTSIDE,
            anchor="self_attn.q_proj",
            folds=LLAMA_FOLDS,
        ),
        "qwen3": Family(
            attention=LLAMA_NORMS + LLAMA_ATTENTION + HEAD_NORMS,
            dense=LLAMA_MLP,
            outside=LLAMA_OUTSIDE,
            anchor="self_attn.q_proj",
            folds=LLAMA_FOLDS,
            defaults=MappingProxyType({"head_dim": 128}),
        ),
        "phi3": Family(
            attention=LLAMA_NORMS + PHI3_ATTENTION,
            dense=PHI3_MLP,
            outside=LLAMA_OUTSIDE,
            anchor="self_attn.qkv_proj",
            folds=PHI3_FOLDS,
        ),
        "smollm3": Family(
            attention=LLAMA_NORMS + LLAMA_ATTENTION,
            dense=LLAMA_MLP,
            outside=LLAMA_OUTSIDE,
            anchor="self_attn.q_proj",
            folds=LLAMA_FOLDS,
            defaults=MappingProxyType({"num_key_value_heads": 4}),
        ),
    }
)
