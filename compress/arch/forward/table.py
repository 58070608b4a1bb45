"""The tables of forwards: how the families compute. One literal row a family, no code about one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from compress.arch.forward.attention_rules import (
    by_head_dim,
    by_scalar,
    by_stretched_head_dim,
    by_two_rotations,
    gpt2_scale,
    no_rotation,
    one_rotation,
    some_layers_rotate,
)
from compress.arch.forward.rope import Rope, RopeRule
from compress.arch.forward.windows import (
    Windows,
    all_but_every_fourth,
    all_but_every_sixth,
    behind_the_first,
    every_other,
    where_there_is_a_width,
    without_rotation,
)
from compress.arch.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Norms:
    """Modules below a block, None for a norm it does not have.

    attention_in, mlp_in: of what attention and MLP read. attention_out, mlp_out: of what they add
    to the residual. q, k: of queries and keys, before they are rotated. query_latent, kv_latent:
    of what queries, and keys and values, are made of.
    """

    attention_in: str | None = None
    attention_out: str | None = None
    mlp_in: str | None = None
    mlp_out: str | None = None
    q: str | None = None
    k: str | None = None
    query_latent: str | None = None
    kv_latent: str | None = None


@dataclass(frozen=True, slots=True)
class Forward:
    """What `describe_forward` has to know about a family; see ForwardSpec and Grouped for the
    meanings.

    A pair is a config key and the value that holds where it is absent; without a key it always
    holds. positions: the table of learned ones, beside the embedding, and the offset into it.
    must_be_off: config keys that mean another computation when they are true. interleaved: whether
    rotations turn neighbours. latent_eps: of the norms of latents.
    """

    norms: Norms
    ropes: Callable[[Mapping[str, Any], DecoderSpec], Sequence[Rope | None]]
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6)
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    norm_late: bool = False
    scale: Callable[[Mapping[str, Any], int, int], float] = by_head_dim
    windows: Windows | None = None
    softcap: tuple[str, float | None] | None = None
    final_softcap: tuple[str, float | None] | None = None
    qk_norm: Literal["head", "full"] | None = None
    qkv: Literal["parts", "heads"] = "parts"
    rotate_late: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    gated: bool = True
    parallel: tuple[str, bool] | None = None
    positions: tuple[str, int] | None = None
    scaled_embedding: bool = False
    experts_per_token: int | None = None
    norm_topk: tuple[str, bool] | None = None
    must_be_off: tuple[str, ...] = ()
    interleaved: tuple[str, bool] = ("", False)
    latent_eps: float = 1e-6


LLAMA_NORMS = Norms("input_layernorm", None, "post_attention_layernorm")
HEAD_NORMS = Norms(
    "input_layernorm",
    None,
    "post_attention_layernorm",
    q="self_attn.q_norm",
    k="self_attn.k_norm",
)
GEMMA2_NORMS = Norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
GEMMA3_NORMS = Norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "self_attn.q_norm",
    "self_attn.k_norm",
)
OLMO2_NORMS = Norms(
    None,
    "post_attention_layernorm",
    None,
    "post_feedforward_layernorm",
    "self_attn.q_norm",
    "self_attn.k_norm",
)
LATENT_NORMS = Norms(
    "input_layernorm",
    None,
    "post_attention_layernorm",
    query_latent="self_attn.q_a_layernorm",
    kv_latent="self_attn.kv_a_layernorm",
)
USUAL = one_rotation(RopeRule())
CWM_ROTATION = MappingProxyType(
    {
        "rope_type": "llama3",
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }
)
GEMMA_ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")

FORWARDS: Mapping[str, Forward] = MappingProxyType(
    {
        "llama": Forward(LLAMA_NORMS, USUAL),
        "mistral": Forward(LLAMA_NORMS, USUAL, windows=Windows(4096)),
        "ministral": Forward(
            LLAMA_NORMS, USUAL, windows=Windows(4096, slides=where_there_is_a_width)
        ),
        "cwm": Forward(
            LLAMA_NORMS,
            one_rotation(RopeRule(theta=1_000_000.0, absent=CWM_ROTATION)),
            eps=("rms_norm_eps", 1e-5),
            windows=Windows(8192, slides=all_but_every_fourth),
        ),
        "qwen2": Forward(
            LLAMA_NORMS, USUAL, windows=Windows(4096, switch=True, slides=behind_the_first)
        ),
        "qwen3": Forward(
            HEAD_NORMS,
            USUAL,
            windows=Windows(4096, switch=True, slides=behind_the_first),
            qk_norm="head",
        ),
        "phi3": Forward(
            LLAMA_NORMS,
            one_rotation(
                RopeRule(
                    part=1.0,
                    kinds=MappingProxyType({"su": "longrope", "yarn": "longrope"}),
                    only=("default", "longrope"),
                    original=4096,
                )
            ),
            eps=("rms_norm_eps", 1e-5),
            windows=Windows(None),
        ),
        "smollm3": Forward(
            LLAMA_NORMS,
            some_layers_rotate(RopeRule(theta=2_000_000.0)),
            windows=Windows(None, slides=without_rotation),
        ),
        # The eps of its norms of latents is in no config: its class builds them without one.
        "deepseek_v3": Forward(
            LATENT_NORMS,
            USUAL,
            scale=by_stretched_head_dim,
            interleaved=("rope_interleave", True),
        ),
        "mixtral": Forward(
            LLAMA_NORMS,
            one_rotation(RopeRule(theta=1_000_000.0)),
            eps=("rms_norm_eps", 1e-5),
            windows=Windows(None),
            experts_per_token=2,
            norm_topk=("", True),
        ),
        "qwen3_moe": Forward(
            HEAD_NORMS,
            USUAL,
            windows=Windows(4096, switch=True),
            qk_norm="head",
            experts_per_token=8,
            norm_topk=("norm_topk_prob", False),
        ),
        "gemma2": Forward(
            GEMMA2_NORMS,
            USUAL,
            norm_offset=1.0,
            norm_late=True,
            scale=by_scalar,
            windows=Windows(4096, slides=every_other),
            softcap=("attn_logit_softcapping", 50.0),
            final_softcap=("final_logit_softcapping", 30.0),
            activation=GEMMA_ACTIVATION,
            scaled_embedding=True,
            must_be_off=("use_bidirectional_attention",),
        ),
        # attn_logit_softcapping is in its config and used by no layer.
        "gemma3_text": Forward(
            GEMMA3_NORMS,
            by_two_rotations,
            norm_offset=1.0,
            norm_late=True,
            scale=by_scalar,
            windows=Windows(4096, slides=all_but_every_sixth),
            final_softcap=("final_logit_softcapping", None),
            qk_norm="head",
            activation=GEMMA_ACTIVATION,
            scaled_embedding=True,
            must_be_off=("use_bidirectional_attention",),
        ),
        "olmo2": Forward(
            OLMO2_NORMS,
            USUAL,
            eps=("rms_norm_eps", 1e-5),
            norm_late=True,
            qk_norm="full",
            rotate_late=True,
        ),
        "gpt2": Forward(
            Norms("ln_1", None, "ln_2"),
            no_rotation,
            eps=("layer_norm_epsilon", 1e-5),
            norm="layer",
            scale=gpt2_scale,
            activation=("activation_function", "gelu_new"),
            gated=False,
            positions=("wpe", 0),
            must_be_off=("add_cross_attention",),
        ),
        "gpt_neox": Forward(
            LLAMA_NORMS,
            one_rotation(RopeRule(theta_key="rotary_emb_base", part_key="rotary_pct", part=0.25)),
            eps=("layer_norm_eps", 1e-5),
            norm="layer",
            qkv="heads",
            activation=("hidden_act", "gelu"),
            gated=False,
            parallel=("use_parallel_residual", True),
        ),
        "opt": Forward(
            Norms("self_attn_layer_norm", None, "final_layer_norm"),
            no_rotation,
            eps=("", 1e-5),
            norm="layer",
            activation=("activation_function", "relu"),
            gated=False,
            positions=("embed_positions", 2),
        ),
    }
)
