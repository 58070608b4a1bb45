"""quantization_config of GPTQ and AWQ: written for real families, and read with suspicion."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from compress.arch.describe import describe
from compress.arch.spec import DecoderSpec, LinearSpec
from compress.checkpoint.detect import detect
from compress.errors import CheckpointError, RecipeError
from compress.formats.awq import codec as awq
from compress.formats.gptq import codec as gptq
from compress.formats.gptq import version2 as gptq_v2
from compress.quant.scheme import ActivationScheme, QuantScheme
from helpers import tiny_models

G4 = QuantScheme(group_size=32)
G8 = QuantScheme(bits=8, group_size=32, symmetric=False)
FP8_CACHE = ActivationScheme(type="float", granularity="tensor", dynamic=False)


def described(family: str, folder: Path) -> tuple[DecoderSpec, dict[str, tuple[int, ...]]]:
    source = tiny_models.make(family, folder)
    tensors = load_file(source / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return describe(json.loads((source / "config.json").read_text()), shapes), shapes


def linears(spec: DecoderSpec) -> list[LinearSpec]:
    return [linear for linear in spec.linears() if linear.role != "router"]


def reread(codec: Any, block: dict[str, Any]) -> Any:
    return codec.read_schemes({"quantization_config": json.loads(json.dumps(block))})


@pytest.mark.parametrize("codec", [gptq, gptq_v2, awq])
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "qwen3_moe"])
def test_one_scheme_comes_back(codec: Any, family: str, tmp_path: Path) -> None:
    spec, shapes = described(family, tmp_path)
    schemes = {linear.tensor: G4 for linear in linears(spec)}
    block = codec.quantization_config(spec, shapes, schemes)
    assert detect({"quantization_config": block}, ()) == codec.NAME
    found = reread(codec, block)
    wanted = replace(G4, symmetric=codec is not awq)
    assert {found.scheme(linear.name) for linear in linears(spec)} == {wanted}
    assert found.transposed == {x.name for x in linears(spec) if x.transposed}
    routers = [linear.name for linear in spec.linears() if linear.role == "router"]
    assert {found.scheme(name) for name in routers} <= {None}


def test_llama_is_plain(tmp_path: Path) -> None:
    spec, shapes = described("llama", tmp_path)
    schemes = {linear.tensor: G4 for linear in linears(spec)}
    block = gptq.quantization_config(spec, shapes, schemes)
    assert block is not None
    del block["meta"]
    assert block == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "format": "gptq",
        "pack_dtype": "int32",
    }
    assert awq.quantization_config(spec, shapes, schemes) == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "lm_head": False,
        "modules_to_not_convert": ["lm_head"],
    }


def _by_role(linear: LinearSpec) -> tuple[QuantScheme | None, bool]:
    """v alone in 8 bits in the first layer, every down dense, every gate with act-order."""
    if linear.role == "v" and ".0." in linear.name:
        return G8, False
    return (None if linear.role == "down" else G4), linear.role == "gate"


def test_mixed_schemes_are_rules(tmp_path: Path) -> None:
    spec, shapes = described("llama", tmp_path)
    chosen = {linear: _by_role(linear) for linear in linears(spec)}
    schemes = {x.tensor: scheme for x, (scheme, _) in chosen.items() if scheme is not None}
    order = {x.tensor for x, (_, ordered) in chosen.items() if ordered}
    head = spec.head_linear()
    assert head is not None
    schemes[head.tensor] = replace(G4, group_size=16)
    block = gptq.quantization_config(spec, shapes, schemes, with_g_idx=order)
    assert block is not None
    asymmetric = {"bits": 8, "group_size": 32, "desc_act": False, "sym": False}
    assert block["dynamic"] == {
        r"-:^model\.layers\.\d+\.mlp\.down_proj$": {},
        r"+:^model\.layers\.0\.self_attn\.v_proj$": asymmetric,
        r"+:^model\.layers\.\d+\.mlp\.gate_proj$": {
            **asymmetric,
            "bits": 4,
            "desc_act": True,
            "sym": True,
        },
        r"+:^lm_head$": {"bits": 4, "group_size": 16, "desc_act": False, "sym": True},
    }
    assert (block["lm_head"], block["desc_act"]) == (True, False)
    found = reread(gptq, block)
    for linear, (scheme, _) in chosen.items():
        assert found.scheme(linear.name) == scheme
    assert found.scheme("lm_head") == replace(G4, group_size=16)


def test_rules_name_what_vllm_fuses(tmp_path: Path) -> None:
    """vLLM asks for qkv_proj, gate_up_proj and all experts at once."""
    spec, shapes = described("llama", tmp_path / "llama")
    schemes = {x.tensor: G8 if x.role in "qkv" else G4 for x in linears(spec) if x.role != "down"}
    found = reread(gptq, gptq.quantization_config(spec, shapes, schemes) or {})
    assert found.scheme("model.layers.1.self_attn.qkv_proj") == G8
    assert found.scheme("model.layers.1.mlp.gate_up_proj") == G4
    assert found.scheme("model.layers.1.mlp.down_proj") is None
    spec, shapes = described("qwen3_moe", tmp_path / "moe")
    schemes = {x.tensor: G4 for x in linears(spec) if x.expert is None}
    found = reread(gptq, gptq.quantization_config(spec, shapes, schemes) or {})
    assert found.scheme("model.layers.0.mlp.experts") is None
    assert found.scheme("model.layers.0.mlp.experts.3.up_proj") is None
    assert found.scheme("model.layers.0.self_attn.q_proj") == G4


def test_dense_layers_of_awq_are_listed(tmp_path: Path) -> None:
    spec, shapes = described("llama", tmp_path)
    schemes = {x.tensor: G4 for x in linears(spec) if x.role != "down"}
    block = awq.quantization_config(spec, shapes, schemes)
    assert block is not None
    assert block["modules_to_not_convert"] == [
        "lm_head",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
    ]
    assert block["dynamic"] == {r"-:^model\.layers\.\d+\.mlp\.down_proj$": {}}
    found = reread(awq, block)
    assert found.scheme("model.layers.0.mlp.down_proj") is None
    assert found.scheme("model.layers.0.mlp.up_proj") == replace(G4, symmetric=False)


def test_awq_has_one_scheme_and_no_order(tmp_path: Path) -> None:
    spec, shapes = described("llama", tmp_path)
    schemes = {x.tensor: G4 if x.role == "q" else QuantScheme(group_size=16) for x in linears(spec)}
    with pytest.raises(RecipeError, match=r"int4 sym g32 and int4 sym g16; use format 'gptq'"):
        awq.quantization_config(spec, shapes, schemes)
    schemes = {x.tensor: G4 for x in linears(spec)}
    with pytest.raises(RecipeError, match=r"these have act-order; use format 'gptq'"):
        awq.quantization_config(spec, shapes, schemes, with_g_idx=schemes)
    both = {x.tensor: replace(G4, symmetric=x.role == "q") for x in linears(spec)}
    assert awq.quantization_config(spec, shapes, both) is not None


@pytest.mark.parametrize("codec", [gptq, gptq_v2, awq])
def test_caches_and_embeddings_have_no_place(codec: Any, tmp_path: Path) -> None:
    spec, shapes = described("llama", tmp_path)
    with pytest.raises(RecipeError, match="no place for the scales of the key/value cache"):
        codec.quantization_config(spec, shapes, {}, kv_cache=FP8_CACHE)
    with pytest.raises(RecipeError, match=r"embed_tokens.weight: .* no place for a quantized emb"):
        codec.quantization_config(spec, shapes, {spec.embedding: G4})
    assert codec.quantization_config(spec, shapes, {}) is None


GOOD = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


def test_rules_of_other_tools_are_followed() -> None:
    """The first one that matches counts; no prefix is a "+:"; -1 is one scale a channel."""
    dynamic = {
        r"-:.*\.experts\.": {},
        r".*\.o_proj": {"bits": 8, "group_size": -1},
        r"+:.*": {"sym": False},
    }
    found = reread(gptq, {**GOOD, "dynamic": dynamic, "extra": 1})
    assert found.scheme("model.layers.0.mlp.experts.1.up") is None
    channel = QuantScheme(bits=8, granularity="channel", group_size=0)
    assert found.scheme("model.layers.0.o_proj") == channel
    assert found.scheme("model.layers.0.up_proj") == replace(G4, symmetric=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, r"quantization_config.bits is 5; this version reads 2, 3, 4, 8"),
        ({"bits": "4"}, r"bits is '4'; it must be a whole number"),
        ({"bits": None}, r"bits is None; it must be a whole number"),
        ({"group_size": 0}, r"group_size is 0; it must be 1 or more, or -1"),
        ({"group_size": True}, r"group_size is True; it must be a whole number"),
        ({"sym": "yes"}, r"sym is 'yes'; it must be true or false"),
        ({"desc_act": 3}, r"desc_act is 3; it must be true or false"),
        ({"checkpoint_format": "marlin"}, r"is 'marlin'; this version reads 'gptq', 'gptq_v2'"),
        ({"format": "gptq_p"}, r"is 'gptq_p'; this version reads 'gptq', 'gptq_v2'"),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, r"format is 'gptq_v2'; this version"),
        ({"pack_dtype": "int16"}, r"pack_dtype is 'int16'; this version reads 'int32'"),
        ({"dynamic": []}, r"dynamic is \[\]; it must be a mapping"),
        ({"dynamic": {"-:(": {}}}, r"dynamic: '-:\(' is not a regular expression"),
        ({"dynamic": {"+:a": 4}}, r"dynamic\['\+:a'\] is 4; it must be a mapping"),
        ({"dynamic": {"+:a": {"bits": 6}}}, r"dynamic\['\+:a'\].bits is 6; this version"),
        ({"transposed": "all"}, r"transposed is 'all'; it must be a list of module names"),
    ],
)
def test_malformed_gptq_configs_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        reread(gptq, {**GOOD, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 8}, r"bits is 8; this version reads 4"),
        ({"version": "gemv"}, r"version is 'gemv'; this version reads 'gemm'"),
        ({"version": 3}, r"version is 3; this version reads 'gemm'"),
        ({"group_size": "128"}, r"group_size is '128'; it must be a whole number"),
        ({"zero_point": None}, r"zero_point is None; it must be true or false"),
        ({"modules_to_not_convert": "lm_head"}, r"must be a list of module names"),
        ({"dynamic": {"+:a": {"bits": 8}}}, r"dynamic\['\+:a'\].bits is 8; this version reads 4"),
        ({"dynamic": {"+:(": {}}}, r"dynamic: '\+:\(' is not a regular expression"),
    ],
)
def test_malformed_awq_configs_are_named(change: dict[str, Any], message: str) -> None:
    good = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    with pytest.raises(CheckpointError, match=message):
        reread(awq, {**good, **change})


def test_rules_in_awqs_config_are_followed() -> None:
    """gptqmodel writes them for AWQ too."""
    dynamic = {
        r"-:.*\.experts\.": {},
        r"+:.*\.o_proj": {"group_size": 64},
        r"+:.*\.k_proj": {"sym": True, "zero_point": False},
    }
    found = reread(awq, {"quant_method": "awq", "group_size": 32, "dynamic": dynamic})
    assert found.scheme("model.layers.0.mlp.experts.1.up") is None
    assert found.scheme("model.layers.0.o_proj") == QuantScheme(group_size=64, symmetric=False)
    assert found.scheme("model.layers.0.k_proj") == G4
    assert found.scheme("model.layers.0.up_proj") == replace(G4, symmetric=False)


def test_old_keys_of_autoawq_are_read() -> None:
    block = {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}
    found = reread(awq, {"quant_method": "awq", **block})
    assert found.scheme("a") == QuantScheme(symmetric=False)


def test_gptqmodel_calls_awqs_layout_gptq() -> None:
    """As it writes a model that it rounded to AWQ's format."""
    block = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gemm"}
    assert detect({"quantization_config": block}, ()) == "awq"
    assert reread(awq, {**block, "sym": True}).scheme("a") == G4
    assert reread(awq, {**block, "sym": False}).scheme("a") == replace(G4, symmetric=False)
