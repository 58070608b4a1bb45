"""DeepseekV3ForCausalLM, of transformers 5.23, as what a model with latent attention loads in:
dense, without a mixture and without prediction of several tokens."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from compress.arch.spec import BlockSpec
from compress.checkpoint.outline import Outline
from compress.checkpoint.shards.layout import Entry

EPS = 1e-6  # of the norm of the latent: transformers has that as a constant, others as rms_norm_eps
# Keys of config.json that mean the same there.
SHARED = (
    "hidden_act",
    "initializer_range",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "attention_dropout",
    "dtype",
    "torch_dtype",
)
# What a family's class assumes where its config.json has no such key, and this one otherwise.
NO_IDS = MappingProxyType({"bos_token_id": None, "eos_token_id": None})
ASSUMED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        **{
            family: MappingProxyType({"bos_token_id": 1, "eos_token_id": 2})
            for family in ("llama", "mistral", "ministral")
        },
        "cwm": MappingProxyType({"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]}),
    }
)
# The same of the context.
CONTEXTS: Mapping[str, int] = MappingProxyType(
    {"llama": 2048, "mistral": 131072, "qwen2": 32768, "ministral": 131072, "cwm": 131072}
)


@dataclass(frozen=True, slots=True)
class LatentShape:
    """rank: numbers of the latent. rotated: of the shared key. nope: of a head's queries and keys
    that nothing rotates. values: of a head. biased: whether attention has biases."""

    rank: int
    rotated: int
    nope: int
    values: int
    biased: bool

    @property
    def cached(self) -> int:
        """Numbers of a token in a layer."""
        return self.rank + self.rotated

    @property
    def split(self) -> str:
        """The same as "48 + 16"."""
        return f"{self.rank} + {self.rotated}"


def stock_config(source: Outline, shape: LatentShape, rope: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the result. rope: its rope_parameters."""
    spec, sizes = source.spec, source.spec.blocks[0].sizes
    assumed = ASSUMED.get(spec.family, NO_IDS)
    shared = {key: source.config[key] for key in SHARED if key in source.config}
    layers = len(spec.blocks)
    # Releases before 5 know the rotation's base by the older key only.
    base = {"rope_theta": rope["rope_theta"]} if rope["rope_type"] == "default" else {}
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **assumed,
        **shared,
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": sizes.heads,
        "max_position_embeddings": context_of(source),
        "tie_word_embeddings": spec.tied,
        "num_key_value_heads": sizes.heads,
        "q_lora_rank": spec.hidden + 1 if shape.biased else None,
        "kv_lora_rank": shape.rank,
        "qk_rope_head_dim": shape.rotated,
        "qk_nope_head_dim": shape.nope,
        "v_head_dim": shape.values,
        "attention_bias": shape.biased,
        "rope_interleave": True,
        **base,
        "rope_parameters": dict(rope),
        "rms_norm_eps": EPS,
        "first_k_dense_replace": layers,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    }


def may_be_landed(model: Outline) -> bool:
    """Whether a model may be one that `mla` made, whose latents are of 1e-7: by what config.json of
    all of these says, as a plan reads no weights. False is certain; a model that was trained with
    these sizes is taken for one too."""
    latents = [x.sizes.latent for x in model.spec.blocks if not x.sizes.experts]
    if model.config.get("rms_norm_eps") != EPS:
        return False
    # A latent of queries is of full rank there, for biases; one that was trained is narrower.
    return any(x and not 0 < x.query_rank <= model.spec.hidden for x in latents)


def context_of(source: Outline) -> int:
    """Positions that the source reads, where its config.json does not say by its class."""
    return source.spec.context or CONTEXTS[source.spec.family]


def stock_entries(source: Outline, shape: LatentShape) -> Iterator[Entry]:
    """The source's tensors, those of attention in place of its q, k and v."""
    spec = source.spec
    gone = {x.name: block for block in spec.blocks for x in block.linears if x.role in "qkv"}
    told = set[int]()
    for name, dtype, dims in source.entries:
        block = gone.get(name.rpartition(".")[0])
        if block is None:
            yield name, dtype, dims
        elif block.index not in told:
            told.add(block.index)
            for leaf, size in attention_shapes(block, spec.hidden, shape).items():
                yield f"{attention_path(block)}.{leaf}", dtype, size


def attention_path(block: BlockSpec) -> str:
    """Where the attention of a block lies in the checkpoint."""
    return next(x.name for x in block.linears if x.role == "o").rpartition(".")[0]


def attention_shapes(
    block: BlockSpec, hidden: int, shape: LatentShape
) -> dict[str, tuple[int, ...]]:
    """Of the tensors that take the place of q, k and v, by their names below attention."""
    heads, rank = block.sizes.heads, shape.rank
    queries, inputs = heads * (shape.nope + shape.rotated), hidden + 1
    tensors: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (shape.cached, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (shape.nope + shape.values), rank),
    }
    if not shape.biased:
        return {"q_proj.weight": (queries, hidden), **tensors}
    return {
        "q_a_proj.weight": (inputs, hidden),
        "q_a_proj.bias": (inputs,),
        "q_a_layernorm.weight": (inputs,),
        "q_b_proj.weight": (queries, inputs),
        **tensors,
        "kv_a_proj_with_mqa.bias": (shape.cached,),
        **_missing_bias(block, hidden),
    }


def _missing_bias(block: BlockSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """That of the output, which the class has where it has any."""
    there = f"{attention_path(block)}.o_proj.bias" in dict(block.modules)
    return {} if there else {"o_proj.bias": (hidden,)}


def stream_scale(eps: float, dtype: str) -> float:
    """What the residual stream is multiplied by, so that norms with EPS give what they gave with
    the source's eps: √(EPS / eps), in 16 bits the nearest power of two, which rounds no weight."""
    exact = math.sqrt(EPS / eps)
    return exact if dtype == "F32" else 2.0 ** round(math.log2(exact))
