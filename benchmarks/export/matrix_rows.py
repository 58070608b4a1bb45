"""What the matrix of exports tries: results of our methods, families of models, and targets."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from benchmarks.matrix import rows as formats

TARGETS = ("onnx", "onnx-genai", "tensorrt", "gguf")
RESULTS, FAMILIES = "results", "families"
# Block -> columns of a target there: what is exported, and in which dtype.
VARIANTS: Mapping[str, Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        RESULTS: {"fp32": ("made", "fp32"), "fp16": ("made", "fp16")},
        FAMILIES: {
            "fp32": ("dense", "fp32"),
            "fp16": ("dense", "fp16"),
            "int4": ("int4", "fp32"),
            "int8": ("int8", "fp32"),
        },
    }
)
# TensorRT's blocks are no smaller.
GROUP = 64
CALIBRATION = {"sources": "self", "samples": 16, "length": 128}


@dataclass(frozen=True, slots=True)
class Row:
    """block: RESULTS or FAMILIES. recipes: what is exported -> a recipe that makes it, None for the
    model itself. family: of a random model that tests/helpers/tiny_models.py makes with `options`,
    None for the demo model."""

    block: str
    name: str
    recipes: Mapping[str, Mapping[str, Any] | None]
    family: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def _recipe(row: formats.Row) -> Mapping[str, Any]:
    """As the matrix of formats has it, with wider groups."""
    text = json.dumps({"stages": row.own_stages(), **row.rest})
    more = {"calibration": CALIBRATION} if row.calibrated else {}
    wide = json.loads(text.replace('"group_size": 32', f'"group_size": {GROUP}'))
    return {"name": "matrix", **wide, "evaluation": None, **more}


def _stage(scheme: Mapping[str, Any] | str, method: str = "rtn", **more: Any) -> Mapping[str, Any]:
    stages = [{"method": method, "scheme": scheme, **more}]
    return {"name": "matrix", "stages": stages, "evaluation": None}


def _stored_as(fmt: str, recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same in another format of checkpoints."""
    return {**recipe, "output": {"format": fmt}}


def group(bits: int, size: int, *, symmetric: bool = True) -> Mapping[str, Any]:
    return {"bits": bits, "symmetric": symmetric, "granularity": "group", "group_size": size}


# What the matrix of formats has no rows for.
_MORE: Mapping[str, Mapping[str, Any] | None] = {
    "dense": None,
    "rtn, 4 bits, groups of 32": _stage(group(4, 32)),
    "rtn, 4 bits, groups of 128": _stage(group(4, 128)),
    "rtn, 4 bits, groups of 48": _stage(group(4, 48), targets=["down_proj"]),
    "rtn, 4 bits, scales above 0": _stage(group(4, GROUP), scale_search="minmax"),
    "rtn, 3 bits, zero points": _stage(group(3, GROUP, symmetric=False)),
    "rtn, 6 bits, zero points": _stage(group(6, GROUP, symmetric=False)),
    "rtn, 7 bits": _stage(group(7, GROUP)),
    "rtn, 8 bits": _stage(group(8, GROUP)),
    "rtn, 8 bits, zero points": _stage(group(8, GROUP, symmetric=False)),
    "rtn, 8 bits, one scale": _stage({"bits": 8, "granularity": "tensor"}),
    "rtn, 4 bits, as gptq": _stored_as("gptq", _stage(group(4, GROUP))),
    "rtn, 4 bits, zero points, as awq": _stored_as("awq", _stage(group(4, GROUP, symmetric=False))),
    "fp8, FP8_DYNAMIC, as modelopt": _stored_as("modelopt", _stage("FP8_DYNAMIC", "fp8")),
    "nvfp4, NVFP4A16, as modelopt": _stored_as("modelopt", _stage("NVFP4A16", "nvfp4")),
    "fp8, FP8_BLOCK, as fp8": _stored_as("fp8", _stage("FP8_BLOCK", "fp8")),
}
_WIDE: Mapping[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
_EXPERTS: Mapping[str, Any] = {**_WIDE, "moe_intermediate_size": 64}
_LATENT: Mapping[str, Any] = {**_WIDE, "kv_lora_rank": 64, "v_head_dim": 32}
_ROPE = {"rope_theta": 10000.0}
_LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "partial_rotary_factor": 0.5}
# Name -> (family, options of tiny_models.make). Sizes that blocks of 64 fill; MLPs are as wide as
# the vocabulary.
_MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{x: (x, _WIDE) for x in ("llama", "mistral", "qwen2", "qwen3", "phi3")},
    "gemma2": ("gemma2", {**_WIDE, "tied": True}),
    "gemma3": ("gemma3_text", {**_WIDE, "tied": True}),
    "gpt2": ("gpt2", {"n_embd": 128, "n_inner": 256}),
    "mixtral": ("mixtral", _WIDE),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    "gpt_neox": ("gpt_neox", _WIDE),
    "opt": ("opt", {"hidden_size": 128, "ffn_dim": 256, "word_embed_proj_dim": 128}),
    "olmo2": ("olmo2", _WIDE),
    "smollm3": ("smollm3", {**_WIDE, "no_rope_layers": None, "num_hidden_layers": 4}),
    "granite, which our engine leaves to transformers": ("granite", _WIDE),
    "llama, tied, with biases": ("llama", {**_WIDE, "tied": True, "bias": True}),
    "llama, llama3's rotation": (
        "llama",
        {
            **_WIDE,
            "rope_parameters": {
                **_ROPE,
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "llama, yarn": (
        "llama",
        {
            **_WIDE,
            "rope_parameters": {
                **_ROPE,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama, dynamic": (
        "llama",
        {**_WIDE, "rope_parameters": {**_ROPE, "rope_type": "dynamic", "factor": 2.0}},
    ),
    "phi3, longrope": (
        "phi3",
        {
            **_WIDE,
            "rope_parameters": {**_ROPE, "rope_type": "longrope", **_LONG},
            # llama.cpp opens a file for multiples of 256 positions, and takes its factors by that.
            "original_max_position_embeddings": 256,
            "max_position_embeddings": 1024,
        },
    ),
    "mistral, a window": ("mistral", {**_WIDE, "sliding_window": 7}),
    "ministral, a window in one layer": ("ministral", _WIDE),
    "qwen2, a window in one layer": (
        "qwen2",
        {**_WIDE, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "deepseek_v3, latents": ("deepseek_v3", _LATENT),
    "deepseek_v3, latents of queries too, with biases, yarn": (
        "deepseek_v3",
        {
            **_LATENT,
            "q_lora_rank": 64,
            "bias": True,
            "rope_parameters": {
                **_ROPE,
                "rope_type": "yarn",
                "factor": 4.0,
                "mscale": 0.8,
                "mscale_all_dim": 0.6,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "gemma2, a head of its own": ("gemma2", _WIDE),
    "smollm3, rotated in the first layer only": ("smollm3", _WIDE),
}
_OF_A_FAMILY: Mapping[str, Mapping[str, Any] | None] = {
    "dense": None,
    "int4": _stage(group(4, GROUP)),
    "int8": _stage(group(8, GROUP)),
}
ROWS = (
    *(Row(RESULTS, name, {"made": recipe}) for name, recipe in _MORE.items()),
    *(Row(RESULTS, row.name, {"made": _recipe(row)}) for row in formats.ROWS),
    *(Row(FAMILIES, n, _OF_A_FAMILY, family, more) for n, (family, more) in _MODELS.items()),
)
