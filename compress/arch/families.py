"""The architecture tables: what a family's tensors are called and what they are for.

One literal entry a family, composed of shared tuples. Nothing here is code about one model;
`describe` reads these rows for all of them. Facts are those of transformers 5: the disk names are
what its `save_pretrained` writes and hub checkpoints hold, the module names what its classes have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Row:
    """One weight of a block, or of the model outside its blocks.

    role: a LinearSpec role, or "norm", "embedding", "head".
    disk: path of its module below the block on disk; `{e}` stands for each expert.
    dims: names of its logical sizes, (out, in) for a linear, resolved from the config.
    module: path below the runnable block, the same as `disk` when empty.
    shared_input, fused: see LinearSpec.
    transposed: a linear whose weight lies [in, out] on disk.
    bias: True when there always is one, a config key when that switches it on, None when it may
        be there or not.
    """

    role: str
    disk: str
    dims: tuple[str, ...]
    module: str = ""
    shared_input: str = ""
    fused: str | None = None
    transposed: bool = False
    bias: bool | str | None = None

    @property
    def target(self) -> str:
        return self.module or self.disk


@dataclass(frozen=True, slots=True)
class FoldRow:
    """Channels that one row of a block writes and others read, with nothing between that a scale
    of each channel would not pass through (see FoldPair).

    writer: `disk` of the row that writes them. readers: roles of those that read them; of experts,
    those of the writer's own, or of all when the writer is no expert.
    channels: name of their number. skip: names of the writer's rows before the channels.
    A row whose writer a block does not have is not for that block.
    """

    writer: str
    readers: tuple[str, ...]
    channels: str
    skip: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """Everything `describe` has to know about a model_type.

    attention, dense, sparse: rows of a block; a block has `attention` and one of the other two.
    folds: where channels can be scaled, in the order the block computes them.
    outside: embeddings and final norm, below the decoder's prefix.
    blocks: name of the list of blocks; root: the decoder's path in the causal-LM module.
    anchor: the row by which a decoder is found among other towers.
    buffers: tensors of old checkpoints that today's classes compute themselves.
    defaults: config values that transformers assumes when the key is absent.
    """

    attention: tuple[Row, ...]
    dense: tuple[Row, ...]
    outside: tuple[Row, ...]
    anchor: str
    folds: tuple[FoldRow, ...]
    sparse: tuple[Row, ...] = ()
    blocks: str = "layers"
    root: str = "model"
    buffers: tuple[str, ...] = ("self_attn.rotary_emb.inv_freq",)
    defaults: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


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
MIXTRAL_EXPERTS = (
    Row("router", "block_sparse_moe.gate", ("experts", "hidden"), "mlp.gate", "mlp_in"),
    Row(
        "gate",
        "block_sparse_moe.experts.{e}.w1",
        ("expert", "hidden"),
        "mlp.experts.{e}.gate",
        "experts.{e}.in",
        "experts.{e}.gate_up",
    ),
    Row(
        "up",
        "block_sparse_moe.experts.{e}.w3",
        ("expert", "hidden"),
        "mlp.experts.{e}.up",
        "experts.{e}.in",
        "experts.{e}.gate_up",
    ),
    Row(
        "down",
        "block_sparse_moe.experts.{e}.w2",
        ("hidden", "expert"),
        "mlp.experts.{e}.down",
        "experts.{e}.mid",
    ),
)
QWEN_EXPERTS = (
    Row("router", "mlp.gate", ("experts", "hidden"), "", "mlp_in"),
    Row(
        "gate",
        "mlp.experts.{e}.gate_proj",
        ("expert", "hidden"),
        "mlp.experts.{e}.gate",
        "experts.{e}.in",
        "experts.{e}.gate_up",
    ),
    Row(
        "up",
        "mlp.experts.{e}.up_proj",
        ("expert", "hidden"),
        "mlp.experts.{e}.up",
        "experts.{e}.in",
        "experts.{e}.gate_up",
    ),
    Row(
        "down",
        "mlp.experts.{e}.down_proj",
        ("hidden", "expert"),
        "mlp.experts.{e}.down",
        "experts.{e}.mid",
    ),
)
GPT2_ATTENTION = (
    Row("norm", "ln_1", ("hidden",), bias=True),
    Row("norm", "ln_2", ("hidden",), bias=True),
    Row("qkv", "attn.c_attn", ("qkv", "hidden"), "", "attn_in", None, transposed=True, bias=True),
    Row("o", "attn.c_proj", ("hidden", "q"), "", "attn_out", None, transposed=True, bias=True),
)
GPT2_MLP = (
    Row("up", "mlp.c_fc", ("mlp", "hidden"), "", "mlp_in", None, transposed=True, bias=True),
    Row("down", "mlp.c_proj", ("hidden", "mlp"), "", "mlp_mid", None, transposed=True, bias=True),
)
LLAMA_OUTSIDE = (
    Row("embedding", "embed_tokens", ("vocab", "hidden")),
    Row("norm", "norm", ("hidden",)),
)
GPT2_OUTSIDE = (
    Row("embedding", "wte", ("vocab", "hidden")),
    Row("positions", "wpe", ("context", "hidden")),
    Row("norm", "ln_f", ("hidden",), bias=True),
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
# None from c_fc to mlp.c_proj: GELU lies between.
GPT2_FOLDS = (
    FoldRow("ln_1", ("qkv",), "hidden"),
    FoldRow("attn.c_attn", ("o",), "kv", skip=("q", "kv")),
    FoldRow("ln_2", ("up",), "hidden"),
)
MIXTRAL_FOLDS = (
    FoldRow("input_layernorm", ("q", "k", "v"), "hidden"),
    FoldRow("self_attn.v_proj", ("o",), "kv"),
    FoldRow("post_attention_layernorm", ("router", "gate", "up"), "hidden"),
    FoldRow("block_sparse_moe.experts.{e}.w3", ("down",), "expert"),
)
QWEN_MOE_FOLDS = (
    FoldRow("input_layernorm", ("q", "k", "v"), "hidden"),
    FoldRow("self_attn.v_proj", ("o",), "kv"),
    FoldRow("post_attention_layernorm", ("router", "gate", "up"), "hidden"),
    FoldRow("mlp.up_proj", ("down",), "mlp"),
    FoldRow("mlp.experts.{e}.up_proj", ("down",), "expert"),
)

LLAMA = Family(
    attention=LLAMA_NORMS + LLAMA_ATTENTION,
    dense=LLAMA_MLP,
    outside=LLAMA_OUTSIDE,
    anchor="self_attn.q_proj",
    folds=LLAMA_FOLDS,
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
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
