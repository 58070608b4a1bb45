"""Families with LayerNorms and a plain MLP of two linears."""

from collections.abc import Mapping
from types import MappingProxyType

from compress.arch.families.family import Family, FoldRow, TensorRow

GPT2_ATTENTION = (
    TensorRow("norm", "ln_1", ("hidden",), bias=True),
    TensorRow("norm", "ln_2", ("hidden",), bias=True),
    TensorRow(
        "qkv", "attn.c_attn", ("qkv", "hidden"), "", "attn_in", None, transposed=True, bias=True
    ),
    TensorRow(
        "o", "attn.c_proj", ("hidden", "attended"), "", "attn_out", None, transposed=True, bias=True
    ),
)
GPT2_MLP = (
    TensorRow("up", "mlp.c_fc", ("mlp", "hidden"), "", "mlp_in", None, transposed=True, bias=True),
    TensorRow(
        "down", "mlp.c_proj", ("hidden", "mlp"), "", "mlp_mid", None, transposed=True, bias=True
    ),
)
GPT_NEOX_ATTENTION = (
    TensorRow("norm", "input_layernorm", ("hidden",), bias=True),
    TensorRow("norm", "post_attention_layernorm", ("hidden",), bias=True),
    TensorRow(
        "qkv", "attention.query_key_value", ("qkv", "hidden"), "", "attn_in", bias="attention_bias"
    ),
    TensorRow(
        "o", "attention.dense", ("hidden", "attended"), "", "attn_out", bias="attention_bias"
    ),
)
GPT_NEOX_MLP = (
    TensorRow("up", "mlp.dense_h_to_4h", ("mlp", "hidden"), "", "mlp_in", bias=True),
    TensorRow("down", "mlp.dense_4h_to_h", ("hidden", "mlp"), "", "mlp_mid", bias=True),
)
OPT_ATTENTION = (
    TensorRow("norm", "self_attn_layer_norm", ("hidden",), bias=True),
    TensorRow("norm", "final_layer_norm", ("hidden",), bias=True),
    TensorRow("q", "self_attn.q_proj", ("q", "hidden"), "", "attn_in", "qkv", bias="enable_bias"),
    TensorRow("k", "self_attn.k_proj", ("k", "hidden"), "", "attn_in", "qkv", bias="enable_bias"),
    TensorRow("v", "self_attn.v_proj", ("v", "hidden"), "", "attn_in", "qkv", bias="enable_bias"),
    TensorRow(
        "o", "self_attn.out_proj", ("hidden", "attended"), "", "attn_out", bias="enable_bias"
    ),
)
OPT_MLP = (
    TensorRow("up", "fc1", ("mlp", "hidden"), "", "mlp_in", bias="enable_bias"),
    TensorRow("down", "fc2", ("hidden", "mlp"), "", "mlp_mid", bias="enable_bias"),
)
GPT2_OUTSIDE = (
    TensorRow("embedding", "wte", ("vocab", "hidden")),
    TensorRow("positions", "wpe", ("context", "hidden")),
    TensorRow("norm", "ln_f", ("hidden",), bias=True),
)
GPT_NEOX_OUTSIDE = (
    TensorRow("embedding", "embed_in", ("vocab", "hidden")),
    TensorRow("norm", "final_layer_norm", ("hidden",), bias=True),
)
OPT_OUTSIDE = (
    TensorRow("embedding", "embed_tokens", ("vocab", "hidden")),
    TensorRow("positions", "embed_positions", ("context2", "hidden")),
    TensorRow("norm", "final_layer_norm", ("hidden",), bias=True),
)

# None from one linear of the MLP to the other: GELU lies between. ReLU lets a scale through.
GPT2_FOLDS = (
    FoldRow("ln_1", ("qkv",), "hidden"),
    FoldRow("attn.c_attn", ("o",), "v", skip=("q", "k")),
    FoldRow("ln_2", ("up",), "hidden"),
)
GPT_NEOX_FOLDS = (
    FoldRow("input_layernorm", ("qkv",), "hidden"),
    FoldRow("attention.query_key_value", ("o",), "v", ("key_width", "key_width"), by_head=True),
    FoldRow("post_attention_layernorm", ("up",), "hidden"),
)
OPT_FOLDS = (
    FoldRow("self_attn_layer_norm", ("q", "k", "v"), "hidden"),
    FoldRow("self_attn.v_proj", ("o",), "v"),
    FoldRow("final_layer_norm", ("up",), "hidden"),
    FoldRow("fc1", ("down",), "mlp", only=("activation_function", "relu")),
)

GPT_LIKE: Mapping[str, Family] = MappingProxyType(
    {
        "gpt2": Family(
            attention=GPT2_ATTENTION,
            dense=GPT2_MLP,
            outside=GPT2_OUTSIDE,
            anchor="attn.c_attn",
            folds=GPT2_FOLDS,
            blocks="h",
            root="transformer",
            buffers=("attn.bias", "attn.masked_bias"),
        ),
        "gpt_neox": Family(
            attention=GPT_NEOX_ATTENTION,
            dense=GPT_NEOX_MLP,
            outside=GPT_NEOX_OUTSIDE,
            anchor="attention.query_key_value",
            folds=GPT_NEOX_FOLDS,
            root="gpt_neox",
            head=("embed_out.weight", "lm_head.weight"),
            buffers=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
        ),
        "opt": Family(
            attention=OPT_ATTENTION,
            dense=OPT_MLP,
            outside=OPT_OUTSIDE,
            anchor="self_attn.q_proj",
            folds=OPT_FOLDS,
            root="model.decoder",
            # opt-350m has its norms behind the residual sums and projections around its blocks,
            # Galactica norms without weights.
            assumes=MappingProxyType(
                {
                    "do_layer_norm_before": True,
                    "word_embed_proj_dim": "hidden_size",
                    "layer_norm_elementwise_affine": True,
                    "_remove_final_layer_norm": False,
                }
            ),
        ),
    }
)
