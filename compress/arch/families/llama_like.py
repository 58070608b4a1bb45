"""Families whose blocks are llama's: a norm before attention and one before a gated MLP."""

from collections.abc import Mapping
from types import MappingProxyType

from compress.arch.families.family import Family, FoldRow, TensorRow

LLAMA_NORMS = (
    TensorRow("norm", "input_layernorm", ("hidden",)),
    TensorRow("norm", "post_attention_layernorm", ("hidden",)),
)
LLAMA_ATTENTION = (
    TensorRow(
        "q", "self_attn.q_proj", ("q", "hidden"), "", "attn_in", "qkv", bias="attention_bias"
    ),
    TensorRow(
        "k", "self_attn.k_proj", ("k", "hidden"), "", "attn_in", "qkv", bias="attention_bias"
    ),
    TensorRow(
        "v", "self_attn.v_proj", ("v", "hidden"), "", "attn_in", "qkv", bias="attention_bias"
    ),
    TensorRow(
        "o", "self_attn.o_proj", ("hidden", "attended"), "", "attn_out", bias="attention_bias"
    ),
)
QWEN2_ATTENTION = (
    TensorRow("q", "self_attn.q_proj", ("q", "hidden"), "", "attn_in", "qkv", bias=True),
    TensorRow("k", "self_attn.k_proj", ("k", "hidden"), "", "attn_in", "qkv", bias=True),
    TensorRow("v", "self_attn.v_proj", ("v", "hidden"), "", "attn_in", "qkv", bias=True),
    TensorRow("o", "self_attn.o_proj", ("hidden", "attended"), "", "attn_out"),
)
HEAD_NORMS = (
    TensorRow("norm", "self_attn.q_norm", ("key_width",)),
    TensorRow("norm", "self_attn.k_norm", ("key_width",)),
)
PHI3_ATTENTION = (
    TensorRow("qkv", "self_attn.qkv_proj", ("qkv", "hidden"), "", "attn_in"),
    TensorRow("o", "self_attn.o_proj", ("hidden", "attended"), "", "attn_out"),
)
LLAMA_MLP = (
    TensorRow("gate", "mlp.gate_proj", ("mlp", "hidden"), "", "mlp_in", "gate_up", bias="mlp_bias"),
    TensorRow("up", "mlp.up_proj", ("mlp", "hidden"), "", "mlp_in", "gate_up", bias="mlp_bias"),
    TensorRow("down", "mlp.down_proj", ("hidden", "mlp"), "", "mlp_mid", bias="mlp_bias"),
)
PHI3_MLP = (
    TensorRow("gate_up", "mlp.gate_up_proj", ("mlp2", "hidden"), "", "mlp_in"),
    TensorRow("down", "mlp.down_proj", ("hidden", "mlp"), "", "mlp_mid"),
)
LLAMA_OUTSIDE = (
    TensorRow("embedding", "embed_tokens", ("vocab", "hidden")),
    TensorRow("norm", "norm", ("hidden",)),
)
LLAMA_FOLDS = (
    FoldRow("input_layernorm", ("q", "k", "v"), "hidden"),
    FoldRow("self_attn.v_proj", ("o",), "v"),
    FoldRow("post_attention_layernorm", ("gate", "up"), "hidden"),
    FoldRow("mlp.up_proj", ("down",), "mlp"),
)
PHI3_FOLDS = (
    FoldRow("input_layernorm", ("qkv",), "hidden"),
    FoldRow("self_attn.qkv_proj", ("o",), "v", skip=("q", "k")),
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
MISTRAL = Family(
    attention=LLAMA_NORMS + LLAMA_ATTENTION,
    dense=LLAMA_MLP,
    outside=LLAMA_OUTSIDE,
    anchor="self_attn.q_proj",
    folds=LLAMA_FOLDS,
    defaults=MappingProxyType({"num_key_value_heads": 8}),
)

LLAMA_LIKE: Mapping[str, Family] = MappingProxyType(
    {
        "llama": LLAMA,
        "mistral": MISTRAL,
        "ministral": MISTRAL,
        "cwm": Family(
            attention=LLAMA_NORMS + LLAMA_ATTENTION,
            dense=LLAMA_MLP,
            outside=LLAMA_OUTSIDE,
            anchor="self_attn.q_proj",
            folds=LLAMA_FOLDS,
            defaults=MappingProxyType({"num_key_value_heads": 8, "head_dim": 128}),
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
