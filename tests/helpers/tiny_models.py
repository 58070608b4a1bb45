"""Tiny random checkpoints of real families, written by transformers' own `save_pretrained`."""

import atexit
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType
from typing import Any, Literal

from compress.arch.spec import DecoderSpec

Dtype = Literal["bf16", "fp16", "fp32"]

VOCAB = 256  # the tokenizer has about half as many tokens, as padded vocabularies do
_TEXT = (
    "once upon a time there was a small dog who liked to play in the park",
    "the old cat sat by the door and looked at the rain for a long time",
    "a girl found a red stone and gave it to her brother, who was very happy",
)

_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
)

# Keys of _SIZES that a family does not have. gpt2 calls them n_embd, n_layer and so on.
_WITHOUT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gpt2": (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        ),
        "gpt_neox": ("num_key_value_heads",),
        "opt": ("num_key_value_heads", "intermediate_size"),
    }
)

# What a family needs beside _SIZES.
_FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {},
        "mistral": {"sliding_window": None, "head_dim": 16},
        "ministral": {
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "cwm": {"head_dim": 16, "sliding_window": 7, "rope_parameters": {"rope_type": "default"}},
        "deepseek_v3": {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 2,
            "num_nextn_predict_layers": 0,
        },
        "qwen2": {},
        "qwen3": {"head_dim": 16},
        "phi3": {},
        "gpt2": {
            "n_embd": 64,
            "n_inner": 96,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
        },
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
        "qwen3_moe": {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32},
        "gemma3_text": {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "gpt_neox": {},
        "opt": {"ffn_dim": 96},
        "olmo2": {},
        "smollm3": {"no_rope_layers": [1, 0]},
        "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0},
        "starcoder2": {"sliding_window": None},
        "glm4": {"head_dim": 16},
    }
)
FAMILIES = tuple(_FAMILIES)
UNLISTED = ("granite", "starcoder2", "glm4")  # in no architecture table
# What retrofits write, in the tables. Tests name them where they differ from families of TABLED.
LANDINGS = ("ministral", "cwm", "deepseek_v3")
TABLED = tuple(family for family in FAMILIES if family not in (*UNLISTED, *LANDINGS))
MIXTURES = ("mixtral", "qwen3_moe")
# Of torch.nn.Linear alone: GPT-2 has Conv1D.
LINEAR = tuple(family for family in (*TABLED, *LANDINGS) if family not in (*MIXTURES, "gpt2"))

# Keys by which a family switches the biases of its linears; a family that is not here has no
# such switch (qwen2's q, k and v and all of gpt2 always have biases).
_BIAS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "llama": ("attention_bias", "mlp_bias"),
        "qwen3": ("attention_bias",),
        "deepseek_v3": ("attention_bias",),
        "qwen3_moe": ("attention_bias",),
        "gemma2": ("attention_bias",),
        "gemma3_text": ("attention_bias",),
        "gpt_neox": ("attention_bias",),
        "opt": ("enable_bias",),
        "olmo2": ("attention_bias",),
        "smollm3": ("attention_bias", "mlp_bias"),
    }
)
BIAS_FAMILIES = tuple(family for family in _BIAS if family not in LANDINGS)


def make(
    family: str,
    folder: Path,
    *,
    dtype: Dtype = "bf16",
    tied: bool = False,
    bias: bool | None = None,
    seed: int = 0,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint with a small tokenizer into `folder` and return it.

    family: one of FAMILIES. bias: sets the family's bias switches (BIAS_FAMILIES); None keeps its
    default. overrides: further keys of the transformers config, in the family's own names.
    Biases and norm weights are random too, so that a lost one changes the logits. What was made in
    this process before is copied: 0.1 s becomes 1 ms.
    """
    key = repr((family, dtype, tied, bias, seed, max_shard_size, sorted(overrides.items())))
    if key not in _MADE:
        master = Path(mkdtemp(dir=_masters()))
        settings = {**_settings(family, bias), "tie_word_embeddings": tied, **overrides}
        _MADE[key] = _make(family, master, dtype, seed, max_shard_size, settings)
    shutil.copytree(_MADE[key], folder, dirs_exist_ok=True)
    return folder


_MADE: dict[str, Path] = {}


@cache
def _masters() -> Path:
    """Gone with this process, not with one that it forks."""
    folder, owner = Path(mkdtemp(prefix="tiny-models-")), os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    return folder


def _make(
    family: str,
    folder: Path,
    dtype: Dtype,
    seed: int,
    max_shard_size: str,
    settings: Mapping[str, Any],
) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    config = AutoConfig.for_model(family, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.tie_weights()
        for parameter in model.parameters():
            _randomize(parameter)
    model.to(torch_dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of at most VOCAB tokens, as tokenizer.json + its config."""
    import json

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 128,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _settings(family: str, bias: bool | None) -> dict[str, Any]:
    sizes = {k: v for k, v in _SIZES.items() if k not in _WITHOUT.get(family, ())}
    settings = {**sizes, **_FAMILIES[family]}
    if bias is not None:
        settings |= dict.fromkeys(_BIAS[family], bias)
    return settings


def _randomize(parameter: Any) -> None:
    import torch

    with torch.no_grad():
        if parameter.dim() >= 2:
            parameter.normal_(0.0, 0.1)
        else:  # keep norm weights near their start (1, or 0 for gemma)
            parameter.add_(torch.randn_like(parameter) * 0.1)


def resized(spec: DecoderSpec, **sizes: int) -> DecoderSpec:
    """With other sizes in every block: fields of BlockSizes."""
    blocks = (replace(x, sizes=replace(x.sizes, **sizes)) for x in spec.blocks)
    return replace(spec, blocks=tuple(blocks))
