"""Families with norms behind attention and MLP, where their outputs join the residual.

Such a norm writes into the residual, which every later block reads, so nothing folds into it.
OLMo 2 has no norm before attention and MLP either: what they read has no writer in the block.
"""

from collections.abc import Mapping
from types import MappingProxyType

from compress.arch.families.family import Family, FoldRow, TensorRow
from compress.arch.families.llama_like import HEAD_NORMS, LLAMA_ATTENTION, LLAMA_MLP, LLAMA_OUTSIDE

OUTPUT_NORMS = (
    TensorRow("norm", "post_attention_layernorm", ("hidden",)),
    TensorRow("norm", "post_feedforward_layernorm", ("hidden",)),
)
GEMMA_NORMS = (
    TensorRow("norm", "input_layernorm", ("hidden",)),
    TensorRow("norm", "pre_feedforward_layernorm", ("hidden",)),
    *OUTPUT_NORMS,
)
OLMO2_NORMS = (
    TensorRow("norm", "self_attn.q_norm", ("q",)),
    TensorRow("norm", "self_attn.k_norm", ("k",)),
    *OUTPUT_NORMS,
)

GEMMA_FOLDS = (
    FoldRow("input_layernorm", ("q", "k", "v"), "hidden"),
    FoldRow("self_attn.v_proj", ("o",), "v"),
    FoldRow("pre_feedforward_layernorm", ("gate", "up"), "hidden"),
    FoldRow("mlp.up_proj", ("down",), "mlp"),
)
OLMO2_FOLDS = (
    FoldRow("self_attn.v_proj", ("o",), "v"),
    FoldRow("mlp.up_proj", ("down",), "mlp"),
)

POST_NORM: Mapping[str, Family] = MappingProxyType(
    {
        "gemma2": Family(
            attention=GEMMA_NORMS + LLAMA_ATTENTION,
            dense=LLAMA_MLP,
            outside=LLAMA_OUTSIDE,
            anchor="self_attn.q_proj",
            folds=GEMMA_FOLDS,
            defaults=MappingProxyType({"num_key_value_heads": 4, "head_dim": 256}),
            norm_offset=1.0,
        ),
        "gemma3_text": Family(
            attention=GEMMA_NORMS + LLAMA_ATTENTION + HEAD_NORMS,
            dense=LLAMA_MLP,
            outside=LLAMA_OUTSIDE,
            anchor="self_attn.q_proj",
            folds=GEMMA_FOLDS,
            # The text_config beside a vision tower leaves out what it does not change.
            defaults=MappingProxyType(
                {
                    "num_attention_heads": 8,
                    "num_key_value_heads": 4,
                    "head_dim": 256,
                    "vocab_size": 262_208,
                    "max_position_embeddings": 131_072,
                }
            ),
            norm_offset=1.0,
        ),
        "olmo2": Family(
            attention=OLMO2_NORMS + LLAMA_ATTENTION,
            dense=LLAMA_MLP,
            outside=LLAMA_OUTSIDE,
            anchor="self_attn.q_proj",
            folds=OLMO2_FOLDS,
        ),
    }
)
