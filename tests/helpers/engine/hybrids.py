"""Decoders whose layers differ in kind and size, as no class of transformers has them: rows for the
tables, random checkpoints, and what they compute in plain torch."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.arch import describe
from compress.arch.families.table import FAMILIES
from compress.arch.forward import forward
from compress.arch.forward.table import FORWARDS
from compress.arch.sizes import BLOCK_KEYS

VOCAB, HIDDEN = 96, 64
FULL, SLIDING = "full_attention", "sliding_attention"

_ALL: Mapping[str, Any] = {
    "model_type": "hybrid",
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "sliding_window": 6,
    "eos_token_id": 0,
}
# What -> the rest of its config.json.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "two kinds": {
        "num_hidden_layers": 4,
        "layer_types": [FULL, SLIDING, FULL, SLIDING],
        "num_attention_heads": [8, 4, 8, 4],
        "num_key_value_heads": [4, 2, 4, 2],
        "head_dim": [16, 24, 16, 24],
        "intermediate_size": [96, 64, 32, 96],
    },
    "narrow values": {
        "num_hidden_layers": 2,
        "layer_types": [FULL, FULL],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "v_head_dim": 8,
        "intermediate_size": 96,
    },
    "wide values and narrow ones, experts": {
        "model_type": "hybrid_moe",
        "use_sliding_window": False,
        "num_hidden_layers": 3,
        "num_attention_heads": [4, 2, 4],
        "num_key_value_heads": [1, 2, 4],
        "head_dim": 16,
        "v_head_dim": [32, 8, 16],
        "intermediate_size": 96,
        "moe_intermediate_size": [32, 48, 32],
        "num_experts": [4, 4, 8],
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}
ROWS = {"hybrid": "qwen3", "hybrid_moe": "qwen3_moe"}


@contextmanager
def known() -> Iterator[None]:
    """The tables have the rows of these decoders: those of a family, with sizes in lists."""
    with pytest.MonkeyPatch.context() as patch:
        families = {
            name: replace(FAMILIES[row], listed=(*BLOCK_KEYS, "value_width"), value_width=True)
            for name, row in ROWS.items()
        }
        patch.setattr(describe, "FAMILIES", {**FAMILIES, **families})
        forwards = {name: FORWARDS[row] for name, row in ROWS.items()}
        patch.setattr(forward, "FORWARDS", {**FORWARDS, **forwards})
        yield


def config_of(what: str, **changes: Any) -> dict[str, Any]:
    return {**_ALL, **CONFIGS[what], **changes}


def make(folder: Path, what: str) -> Path:
    """A random checkpoint in fp32, with a config.json that holds more than one class could."""
    config, generator = config_of(what), torch.Generator().manual_seed(5)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        if len(shape) > 1
        else 1 + 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes_of(config).items()
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that the config asks for."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for i in range(config["num_hidden_layers"]):
        at = Sizes(config, i)
        heads, kv_heads, keys, values = at.attention
        found |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
                "self_attn.q_proj": (heads * keys, HIDDEN),
                "self_attn.k_proj": (kv_heads * keys, HIDDEN),
                "self_attn.v_proj": (kv_heads * values, HIDDEN),
                "self_attn.o_proj": (HIDDEN, heads * values),
                "self_attn.q_norm": (keys,),
                "self_attn.k_norm": (keys,),
                **_mlp("mlp", at("intermediate_size")),
            }.items()
            if not (at.sparse and name.startswith("mlp"))
        }
        if at.sparse:
            mlp = {"mlp.gate": (at("num_experts"), HIDDEN)}
            for e in range(at("num_experts")):
                mlp |= _mlp(f"mlp.experts.{e}", at("moe_intermediate_size"))
            found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in mlp.items()}
    return found


def _mlp(path: str, width: int) -> dict[str, tuple[int, int]]:
    return {
        f"{path}.gate_proj": (width, HIDDEN),
        f"{path}.up_proj": (width, HIDDEN),
        f"{path}.down_proj": (HIDDEN, width),
    }


class Sizes:
    """Of a layer, as its config has them: in a list, or for all layers."""

    def __init__(self, config: Mapping[str, Any], layer: int) -> None:
        self.config, self.layer = config, layer

    def __call__(self, key: str, default: Any = None) -> Any:
        value = self.config.get(key, default)
        return value[self.layer] if isinstance(value, list) else value

    @property
    def attention(self) -> tuple[int, int, int, int]:
        """Heads, those of keys and values, their widths."""
        keys = self("head_dim")
        return (
            self("num_attention_heads"),
            self("num_key_value_heads"),
            keys,
            self("v_head_dim", keys),
        )

    @property
    def sparse(self) -> bool:
        return "num_experts" in self.config and self.layer not in self.config["mlp_only_layers"]


def logits(folder: Path, ids: list[int]) -> Tensor:
    """fp64 [tokens, vocabulary], of one text in one go."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: x.double() for name, x in load_file(folder / "model.safetensors").items()}
    x = tensors["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        at, path = Sizes(config, i), f"model.layers.{i}."
        own = {n.removeprefix(path): w for n, w in tensors.items() if n.startswith(path)}
        x = x + _attention(_rms(x, own["input_layernorm.weight"]), own, at)
        normed = _rms(x, own["post_attention_layernorm.weight"])
        x = x + (_mixture(normed, own, at) if at.sparse else _gated(normed, own, "mlp"))
    return _rms(x, tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _attention(x: Tensor, own: Mapping[str, Tensor], at: Sizes) -> Tensor:
    heads, kv_heads, keys, values = at.attention
    q, k, v = (x @ own[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    q = _turned(_rms(q.view(-1, heads, keys), own["self_attn.q_norm.weight"]))
    k = _turned(_rms(k.view(-1, kv_heads, keys), own["self_attn.k_norm.weight"]))
    k = k.repeat_interleave(heads // kv_heads, 1)
    v = v.view(-1, kv_heads, values).repeat_interleave(heads // kv_heads, 1)
    scores = torch.einsum("thd,shd->hts", q, k) * keys**-0.5
    place = torch.arange(len(x))
    seen = place[:, None] >= place
    if at("layer_types", FULL) == SLIDING:
        seen &= place[:, None] - place < at("sliding_window")
    shares = scores.masked_fill(~seen, -math.inf).softmax(-1)
    out = torch.einsum("hts,shd->thd", shares, v).flatten(1)
    return out @ own["self_attn.o_proj.weight"].T


def _turned(x: Tensor) -> Tensor:
    """x: [T, heads, width], the halves of a head against each other."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(x))[:, None, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _gated(x: Tensor, own: Mapping[str, Tensor], path: str) -> Tensor:
    gate, up = (x @ own[f"{path}.{name}_proj.weight"].T for name in ("gate", "up"))
    return (torch.nn.functional.silu(gate) * up) @ own[f"{path}.down_proj.weight"].T


def _mixture(x: Tensor, own: Mapping[str, Tensor], at: Sizes) -> Tensor:
    shares = (x @ own["mlp.gate.weight"].T).softmax(-1)
    best = shares.topk(at("num_experts_per_tok"), -1)
    weights = best.values / best.values.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for row, (chosen, weight) in enumerate(zip(best.indices, weights, strict=True)):
        for expert, share in zip(chosen.tolist(), weight, strict=True):
            out[row] += share * _gated(x[row], own, f"mlp.experts.{expert}")
    return out
