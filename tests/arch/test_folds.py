"""Fold pairs come from rows of the tables, for every family and every kind of block."""

from pathlib import Path

import pytest

from compress.arch.describe import describe
from compress.arch.families.table import FAMILIES
from compress.arch.spec import BlockSpec, FoldPair
from compress.checkpoint import Checkpoint
from helpers import tiny_models


def block_of(family: str, folder: Path, index: int = 0, **overrides: object) -> BlockSpec:
    checkpoint = Checkpoint.open(tiny_models.make(family, folder, **overrides))
    return describe(checkpoint.config, checkpoint.shapes).blocks[index]


def short(block: BlockSpec, pair: FoldPair) -> tuple[str, tuple[int, int], list[str]]:
    """The pair without the block's prefix."""
    cut = len(block.prefix) + 1
    return pair.writer[cut:], pair.rows, [name[cut:] for name in pair.readers]


LLAMA = [
    ("input_layernorm", (0, 64), ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    ("self_attn.v_proj", (0, 32), ["self_attn.o_proj"]),
    ("post_attention_layernorm", (0, 64), ["mlp.gate_proj", "mlp.up_proj"]),
    ("mlp.up_proj", (0, 96), ["mlp.down_proj"]),
]
PHI3 = [
    ("input_layernorm", (0, 64), ["self_attn.qkv_proj"]),
    ("self_attn.qkv_proj", (96, 128), ["self_attn.o_proj"]),
    ("post_attention_layernorm", (0, 64), ["mlp.gate_up_proj"]),
    ("mlp.gate_up_proj", (96, 192), ["mlp.down_proj"]),
]
GPT2 = [
    ("ln_1", (0, 64), ["attn.c_attn"]),
    ("attn.c_attn", (128, 192), ["attn.c_proj"]),
    ("ln_2", (0, 64), ["mlp.c_fc"]),  # none to mlp.c_proj: GELU lies between
]


GEMMA = [LLAMA[0], LLAMA[1], ("pre_feedforward_layernorm", *LLAMA[2][1:]), LLAMA[3]]
OPT = [
    ("self_attn_layer_norm", *LLAMA[0][1:]),
    ("self_attn.v_proj", (0, 64), ["self_attn.out_proj"]),
    ("final_layer_norm", (0, 64), ["fc1"]),
    ("fc1", (0, 96), ["fc2"]),  # ReLU lets a scale through
]
GPT_NEOX = [
    ("input_layernorm", (0, 64), ["attention.query_key_value"]),
    ("attention.query_key_value", (32, 192), ["attention.dense"]),
    ("post_attention_layernorm", (0, 64), ["mlp.dense_h_to_4h"]),
]


DEEPSEEK = [
    ("input_layernorm", (0, 64), ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"]),
    ("self_attn.q_a_layernorm", (0, 24), ["self_attn.q_b_proj"]),
    ("self_attn.kv_a_layernorm", (0, 32), ["self_attn.kv_b_proj"]),
    ("self_attn.kv_b_proj", (16, 128), ["self_attn.o_proj"]),
    LLAMA[2],
    LLAMA[3],
]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        *((name, LLAMA) for name in ("llama", "mistral", "qwen2", "qwen3", "smollm3")),
        ("phi3", PHI3),
        ("gpt2", GPT2),
        ("gemma2", GEMMA),
        ("gemma3_text", GEMMA),
        ("opt", OPT),
        ("gpt_neox", GPT_NEOX),
    ],
)
def test_pairs_of_dense_families(
    family: str, expected: list[tuple[str, tuple[int, int], list[str]]], tmp_path: Path
) -> None:
    block = block_of(family, tmp_path, index=1)
    assert [short(block, pair) for pair in block.folds] == expected
    keys = ["attn_in", "attn_out", "mlp_in", "mlp_mid"]
    assert [pair.shared_input for pair in block.folds] == keys[: len(expected)]
    repeats = [(pair.repeat, pair.head_dim) for pair in block.folds]
    grouped = (1, 0) if family in ("gpt2", "gpt_neox", "opt") else (2, 16)
    assert repeats == [(1, 0), grouped, (1, 0), (1, 0)][: len(expected)]
    offsets = [pair.offset for pair in block.folds]
    assert offsets == ([1, 0, 1, 0] if family.startswith("gemma") else [0] * len(expected))


def test_a_norm_behind_attention_or_mlp_is_read_by_later_blocks_and_folds_into_nothing(
    tmp_path: Path,
) -> None:
    block = block_of("olmo2", tmp_path)
    assert [short(block, pair) for pair in block.folds] == [LLAMA[1], LLAMA[3]]


def test_channels_of_heads_that_lie_apart(tmp_path: Path) -> None:
    block = block_of("gpt_neox", tmp_path)
    values = [head * 48 + 32 + within for head in range(4) for within in range(16)]
    assert block.folds[1].channels() == values
    assert block.folds[0].channels() == slice(0, 64)


def test_pairs_of_latent_attention(tmp_path: Path) -> None:
    """A latent's norm is read by nothing but what unfolds it, a value behind what a key is."""
    block = block_of("deepseek_v3", tmp_path / "latent", q_lora_rank=24)
    assert [short(block, pair) for pair in block.folds] == DEEPSEEK
    values = [head * 32 + 16 + within for head in range(4) for within in range(16)]
    assert block.folds[3].channels() == values
    direct = block_of("deepseek_v3", tmp_path / "direct")
    queries = ("input_layernorm", (0, 64), ["self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"])
    assert [short(direct, pair) for pair in direct.folds] == [queries, *DEEPSEEK[2:]]


def test_an_activation_that_is_no_relu_lies_between(tmp_path: Path) -> None:
    block = block_of("opt", tmp_path, activation_function="gelu")
    assert [short(block, pair) for pair in block.folds] == OPT[:3]


@pytest.mark.parametrize(
    ("family", "router", "names"),
    [
        ("mixtral", "block_sparse_moe.gate", ("w1", "w3", "w2")),
        ("qwen3_moe", "mlp.gate", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_the_norm_of_a_mixture_is_read_by_router_and_all_experts(
    family: str, router: str, names: tuple[str, str, str], tmp_path: Path
) -> None:
    block = block_of(family, tmp_path)
    folds = [short(block, pair) for pair in block.folds]
    gate, up, down = names
    experts = [f"{router.rpartition('.')[0]}.experts.{e}" for e in range(4)]
    assert folds[2][2] == [router, *(f"{e}.{name}" for e in experts for name in (gate, up))]
    width = 96 if family == "mixtral" else 32
    assert folds[3:] == [(f"{e}.{up}", (0, width), [f"{e}.{down}"]) for e in experts]
    assert [pair.shared_input for pair in block.folds[2:4]] == ["mlp_in", "experts.0.mid"]


def test_a_dense_block_of_a_mixture_has_a_dense_blocks_pairs(tmp_path: Path) -> None:
    block = block_of("qwen3_moe", tmp_path, index=1, mlp_only_layers=[1])
    assert [short(block, pair) for pair in block.folds] == LLAMA


def test_biases_of_the_writer_are_written_with_its_channels(tmp_path: Path) -> None:
    block = block_of("llama", tmp_path, bias=True)
    tensors = {pair.writer.rpartition(".")[2]: pair.tensors for pair in block.folds}
    assert [t.rpartition(".")[2] for t in tensors["v_proj"]] == ["weight", "bias"]
    assert [t.rpartition(".")[2] for t in tensors["up_proj"]] == ["weight", "bias"]
    assert [t.rpartition(".")[2] for t in tensors["input_layernorm"]] == ["weight"]


def test_every_family_has_pairs_and_a_decoder_in_no_table_none(tmp_path: Path) -> None:
    assert all(family.folds for family in FAMILIES.values())
    assert block_of("granite", tmp_path).folds == ()
