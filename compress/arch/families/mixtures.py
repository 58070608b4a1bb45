"""Families with a mixture of experts in place of llama's MLP."""

from collections.abc import Mapping
from types import MappingProxyType

from compress.arch.families.family import Family, FoldRow, TensorRow
from compress.arch.families.llama_like import (
    HEAD_NORMS,
    LLAMA_ATTENTION,
    LLAMA_MLP,
    LLAMA_NORMS,
    LLAMA_OUTSIDE,
)

MIXTRAL_EXPERTS = (
    TensorRow("router", "block_sparse_moe.gate", ("experts", "hidden"), "mlp.gate", "mlp_in"),
    TensorRow(
        "gate",
        "block_sparse_moe.experts.{e}.w1",
        ("expert", "hidden"),
        "mlp.experts.{e}.gate",
        "experts.{e}.in",
        "experts.{e}.gate_up",
    ),
    TensorRow(
        "up",
        "block_sparse_moe.experts.{e}.w3",
        ("expert", "hidden"),
        "mlp.experts.{e}.up",
        "experts.{e}.in",
        "experts.{e}.gate_up",
    ),
    TensorRow(
        "down",
        "block_sparse_moe.experts.{e}.w2",
        ("hidden", "expert"),
        "mlp.experts.{e}.down",
        "experts.{e}.mid",
    ),
)
QWEN_EXPERTS = (
    TensorRow("router", "mlp.gate", ("experts", "hidden"), "", "mlp_in"),
    TensorRow(
        "gate",
        "mlp.experts.{e}.gate_proj",
        ("expert", "hidden"),
        "mlp.experts.{e}.gate",
        "experts.{e}.in",
        "experts.{e}.gate_up",
    ),
    TensorRow(
        "up",
        "mlp.experts.{e}.up_proj",
        ("expert", "hidden"),
        "mlp.experts.{e}.up",
        "experts.{e}.in",
        "experts.{e}.gate_up",
    ),
    TensorRow(
        "down",
        "mlp.experts.{e}.down_proj",
        ("hidden", "expert"),
        "mlp.experts.{e}.down",
        "experts.{e}.mid",
    ),
)
MIXTRAL_FOLDS = (
    FoldRow("input_layernorm", ("q", "k", "v"), "hidden"),
    FoldRow("self_attn.v_proj", ("o",), "v"),
    FoldRow("post_attention_layernorm", ("router", "gate", "up"), "hidden"),
    FoldRow("block_sparse_moe.experts.{e}.w3", ("down",), "expert"),
)
QWEN_MOE_FOLDS = (
    FoldRow("input_layernorm", ("q", "k", "v"), "hidden"),
    FoldRow("self_attn.v_proj", ("o",), "v"),
    FoldRow("post_attention_layernorm", ("router", "gate", "up"), "hidden"),
    FoldRow("mlp.up_proj", ("down",), "mlp"),
    FoldRow("mlp.experts.{e}.up_proj", ("down",), "expert"),
)

MIXTURES: Mapping[str, Family] = MappingProxyType(
    {
        "mixtral": Family(
            attention=LLAMA_NORMS + LLAMA_ATTENTION,
            dense=(),
            sparse=MIXTRAL_EXPERTS,
            outside=LLAMA_OUTSIDE,
            anchor="self_attn.q_proj",
            folds=MIXTRAL_FOLDS,
            defaults=MappingProxyType({"num_key_value_heads": 8, "num_local_experts": 8}),
        ),
        "qwen3_moe": Family(
            attention=LLAMA_NORMS + LLAMA_ATTENTION + HEAD_NORMS,
            dense=LLAMA_MLP,
            sparse=QWEN_EXPERTS,
            outside=LLAMA_OUTSIDE,
            anchor="self_attn.q_proj",
            folds=QWEN_MOE_FOLDS,
            defaults=MappingProxyType({"num_key_value_heads": 4, "num_experts": 128}),
        ),
    }
)
