"""What GGUF calls the families and what its reader computes for each, as data.

Facts are those of llama.cpp of October 2026, whose code fixes per architecture what other formats
say in a config: the activation, which layers have a window, what scales attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

ALL_BIASES = ("q", "k", "v", "o", "gate", "up", "down")
GPT_BIASES = ("qkv", "o", "up", "down")


@dataclass(frozen=True, slots=True)
class Arch:
    """One architecture of the reader.

    name: general.architecture. neighbours: it rotates neighbouring numbers of a head, so rows of q
    and k change places. ropes: kinds of rotation that it knows. part: it may rotate a part of a
    head. activations: that it computes; approximate: those that it computes a little differently.
    biases: roles of linears that may have a bias. bias_needed: those of them that must have one.
    period: every layer but each period-th has a window; None for an architecture without windows.
    local_rope: layers with a window have a rotation of their own.
    unrotated: every such layer does not rotate.
    softcaps: it caps scores and logits, always. head: "either", "tied" (it takes no other than the
    embedding) or "own" (it wants one stored). wide: heads make up the hidden size exactly.
    by_width_at: number of layers of the model whose attention is scaled by the width of the
    residual over the heads, not by that of a head.
    experts: every layer is a mixture, whose chosen weights add up to 1.
    window_key: phi3, whose readers once took a missing key for a window.
    read_as: model type as which transformers reads such files; None where it does not.
    """

    name: str
    neighbours: bool = False
    ropes: tuple[str, ...] = ("default", "linear", "yarn")
    part: bool = False
    activations: tuple[str, ...] = ("silu",)
    approximate: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    bias_needed: bool = False
    period: int | None = None
    local_rope: bool = False
    unrotated: int | None = None
    softcaps: bool = False
    head: Literal["either", "tied", "own"] = "either"
    wide: bool = False
    by_width_at: int | None = None
    experts: bool = False
    window_key: bool = False
    read_as: str | None = None


LLAMA = Arch(
    "llama",
    neighbours=True,
    ropes=("default", "linear", "llama3", "yarn", "longrope"),
    biases=ALL_BIASES,
    read_as="llama",
)
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new")

# A family of our tables -> what stands for it. One that is not here has no architecture there.
ARCHES: Mapping[str, Arch] = MappingProxyType(
    {
        "llama": LLAMA,
        "mistral": LLAMA,
        "mixtral": Arch("llama", neighbours=True, ropes=LLAMA.ropes, experts=True),
        "qwen2": Arch("qwen2", biases=("q", "k", "v"), bias_needed=True, read_as="qwen2"),
        "qwen3": Arch("qwen3", read_as="qwen3"),
        "qwen3_moe": Arch("qwen3moe", experts=True, read_as="qwen3_moe"),
        "phi3": Arch(
            "phi3",
            ropes=("default", "longrope"),
            part=True,
            wide=True,
            window_key=True,
            read_as="phi3",
        ),
        "smollm3": Arch("smollm3", neighbours=True, unrotated=4),
        "gemma2": Arch(
            "gemma2",
            ropes=("default", "linear"),
            activations=TANH_GELU,
            period=2,
            softcaps=True,
            head="tied",
            by_width_at=46,
            read_as="gemma2",
        ),
        "gemma3_text": Arch(
            "gemma3",
            ropes=("default", "linear"),
            activations=TANH_GELU,
            period=6,
            local_rope=True,
            by_width_at=62,
            read_as="gemma3_text",
        ),
        "olmo2": Arch("olmo2", head="own", wide=True),
        "gpt2": Arch(
            "gpt2",
            ropes=(),
            activations=TANH_GELU,
            biases=GPT_BIASES,
            bias_needed=True,
            wide=True,
            read_as="gpt2",
        ),
        "gpt_neox": Arch(
            "gptneox",
            ropes=("default", "linear"),
            part=True,
            activations=("gelu", *TANH_GELU),
            approximate=("gelu",),
            biases=GPT_BIASES,
            bias_needed=True,
            head="own",
            wide=True,
        ),
    }
)

# Fields of Norms -> names in a block.
NORMS: Mapping[str, str] = MappingProxyType(
    {
        "attention_in": "attn_norm",
        "attention_out": "post_attention_norm",
        "mlp_in": "ffn_norm",
        "mlp_out": "post_ffw_norm",
        "q": "attn_q_norm",
        "k": "attn_k_norm",
    }
)
# Roles of linears -> names in a block; those of experts stand in one tensor, with _exps behind.
ROLES: Mapping[str, str] = MappingProxyType(
    {
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "qkv": "attn_qkv",
        "o": "attn_output",
        "router": "ffn_gate_inp",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "gate_up": "ffn_up",
        "down": "ffn_down",
    }
)
