from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from compress.arch.describe import describe
from compress.arch.spec import DecoderSpec
from compress.checkpoint.reader import Checkpoint
from compress.errors import CheckpointError
from compress.formats.compressed_tensors.config import ignored_modules, quantization_config
from compress.formats.compressed_tensors.config_read import parse
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from helpers import tiny_models

G4, G8 = QuantScheme(group_size=32), QuantScheme(bits=8, group_size=32)
A8 = QuantScheme(bits=8, granularity="channel", group_size=0, activation=ActivationScheme())


def opened(family: str, folder: Path, **kw: Any) -> tuple[DecoderSpec, dict[str, tuple[int, ...]]]:
    checkpoint = Checkpoint.open(tiny_models.make(family, folder, **kw))
    return describe(checkpoint.config, checkpoint.shapes), checkpoint.shapes


def build(
    spec: DecoderSpec, shapes: Mapping[str, tuple[int, ...]], by_role: Mapping[str, QuantScheme]
) -> dict[str, Any]:
    schemes = {
        x.tensor: by_role.get(x.role, G4)
        for x in spec.linears()
        if x.role != "router" and by_role.get(x.role, G4) is not None
    }
    config = quantization_config(spec, shapes, schemes)
    assert config is not None
    return config


def leaves(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        for value in node.values():
            yield from leaves(value)
    else:
        yield node


def test_one_scheme(tmp_path: Path) -> None:
    config = build(*opened("llama", tmp_path, tied=True), {})
    assert config["format"] == "pack-quantized"
    assert config["ignore"] == ["lm_head"]
    assert config["config_groups"] == {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "dynamic": False,
                "group_size": 32,
            },
        }
    }
    assert None not in list(leaves(config))


def test_unquantized_linears_are_ignored_by_name(tmp_path: Path) -> None:
    spec, shapes = opened("qwen3_moe", tmp_path)
    schemes = {x.tensor: G4 for x in spec.linears() if x.role not in ("router", "o")}
    assert ignored_modules(spec, shapes, schemes) == [
        "lm_head",
        "model.layers.0.mlp.gate",
        "model.layers.0.self_attn.o_proj",
        "model.layers.1.mlp.gate",
        "model.layers.1.self_attn.o_proj",
    ]


def test_nothing_quantized(tmp_path: Path) -> None:
    assert quantization_config(*opened("llama", tmp_path), {}) is None


@pytest.mark.parametrize(
    ("by_role", "form"),
    [
        ({"down": G8}, "pack-quantized"),
        ({"down": A8, "o": A8}, "mixed-precision"),
        ({}, None),
        ({"down": PRESETS["FP8"], "o": PRESETS["NVFP4A16"]}, "mixed-precision"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_every_module_gets_its_scheme_back(
    family: str, by_role: dict[str, QuantScheme], form: str | None, tmp_path: Path
) -> None:
    spec, shapes = opened(family, tmp_path)
    config = build(spec, shapes, by_role)
    assert form is None or config["format"] == form
    schemes = parse({"quantization_config": config})
    for linear in spec.linears():
        want = None if linear.role == "router" else by_role.get(linear.role, G4)
        assert schemes.scheme(linear.name) == want
    assert schemes.scheme("lm_head") is None
    assert schemes.transposed == {x.name for x in spec.linears() if x.transposed}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("FP8", "float-quantized"),
        ("FP8_DYNAMIC", "float-quantized"),
        ("FP8_BLOCK", "float-quantized"),
        ("NVFP4A16", "nvfp4-pack-quantized"),
        ("W8A8_STATIC", "int-quantized"),
    ],
)
def test_presets_are_what_compressed_tensors_calls_so(name: str, form: str, tmp_path: Path) -> None:
    spec, shapes = opened("llama", tmp_path)
    config = quantization_config(spec, shapes, {x.tensor: PRESETS[name] for x in spec.linears()})
    assert config is not None
    assert config["format"] == form
    group = config["config_groups"]["group_0"]
    assert group["weights"] | WEIGHTS[name] == group["weights"]
    assert group.get("input_activations", {}) == INPUTS[name]
    assert parse({"quantization_config": config}).scheme("a.b") == PRESETS[name]


WEIGHTS: dict[str, dict[str, Any]] = {
    "FP8": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "FP8_DYNAMIC": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "FP8_BLOCK": {"type": "float", "strategy": "block", "block_structure": [128, 128]},
    "NVFP4A16": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "W8A8_STATIC": {"num_bits": 8, "type": "int", "strategy": "channel"},
}
_INPUTS = {"num_bits": 8, "type": "float", "symmetric": True}
INPUTS: dict[str, dict[str, Any]] = {
    "FP8": {**_INPUTS, "strategy": "tensor", "dynamic": False},
    "FP8_DYNAMIC": {**_INPUTS, "strategy": "token", "dynamic": True},
    "FP8_BLOCK": {**_INPUTS, "strategy": "group", "dynamic": True, "group_size": 128},
    "NVFP4A16": {},
    "W8A8_STATIC": {**_INPUTS, "type": "int", "strategy": "tensor", "dynamic": False},
}


def test_experts_of_one_scheme_become_one_pattern(tmp_path: Path) -> None:
    spec, shapes = opened("mixtral", tmp_path)
    groups = build(spec, shapes, {"down": G8})["config_groups"]
    assert (
        r"re:^model\.layers\.0\.block_sparse_moe\.experts\.\d+\.w2$" in groups["group_1"]["targets"]
    )
    schemes = {x.tensor: G4 if x.expert == 1 else G8 for x in spec.linears() if x.role == "down"}
    config = quantization_config(spec, shapes, schemes)
    assert config is not None
    assert config["config_groups"]["group_1"]["targets"] == [
        f"model.layers.{i}.block_sparse_moe.experts.1.w2" for i in range(2)
    ]


def test_odd_bits_name_the_version_that_reads_them(tmp_path: Path) -> None:
    spec, shapes = opened("llama", tmp_path)
    q_proj = "model.layers.0.self_attn.q_proj.weight"
    for bits, version in ((4, "0.15.0"), (3, "0.18.0")):
        config = quantization_config(spec, shapes, {q_proj: QuantScheme(bits=bits)})
        assert config is not None
        assert config["version"] == version


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"weights": {"type": "bool"}}, r"weights.type is 'bool'; .* reads 'int', 'float'"),
        ({"weights": {"strategy": "token"}}, r"weights.strategy is 'token'; .* 'group', 'block'"),
        (
            {"weights": {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32}},
            r"weights.strategy is 'group'; this version reads 'tensor_group'",
        ),
        (
            {"weights": {"type": "float", "strategy": "group", "scale_dtype": "torch.uint8"}},
            r"weights.scale_dtype is 'uint8'; this version reads None, 'bfloat16'",
        ),
        (
            {"weights": {"type": "float", "strategy": "block", "block_structure": [128, 64]}},
            r"block_structure is \[128, 64\]; this version reads square blocks such as",
        ),
        ({"weights": {"strategy": "block"}}, r"block_structure is None; this version reads square"),
        ({"weights": {"type": "float", "num_bits": 6}}, r"weights: bits is 6; floats have 8"),
        (
            {"weights": {}, "format": "mxfp8-quantized"},
            r"group_0.format is 'mxfp8-quantized'",
        ),
        (
            {"weights": {}, "input_activations": {"num_bits": 4, "type": "float"}},
            r"input_activations: activation bits is 4; floats have 8",
        ),
        (
            {"weights": {}, "input_activations": {"dynamic": "local", "strategy": "tensor"}},
            r"input_activations.dynamic is 'local'; it must be true or false",
        ),
        (
            {"weights": {}, "input_activations": {"strategy": "channel"}},
            r"input_activations.strategy is 'channel'; this version reads 'token', 'tensor'",
        ),
        (
            {"weights": {}, "input_activations": {"strategy": "token"}},
            r"input_activations: activation granularity is 'token' with dynamic false",
        ),
        (
            {"weights": {}, "input_activations": {"symmetric": False, "dynamic": True}},
            r"input_activations.symmetric is False; this version reads True",
        ),
        (
            {"weights": {}, "output_activations": {"num_bits": 8}},
            r"output_activations is {'num_bits': 8}; this version reads None",
        ),
    ],
)
def test_foreign_schemes_are_refused(group: dict[str, Any], message: str) -> None:
    block = {"config_groups": {"group_0": {"targets": ["Linear"], **group}}}
    with pytest.raises(CheckpointError, match=message):
        parse({"quantization_config": block})


def test_left_out_keys_are_inferred() -> None:
    weights = {"num_bits": 4, "type": "int", "group_size": -1, "actorder": None}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    block = {"config_groups": {"group_0": group}, "ignore": None}
    scheme = parse({"quantization_config": block}).scheme("a.b")
    assert scheme == QuantScheme(bits=4, granularity="channel", group_size=0)


def test_old_spellings_are_read() -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x128"}
    group = {"targets": ["Linear"], "weights": weights}
    fp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    scales = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
    other = {"targets": ["re:.*down"], "weights": {**fp4, **scales}}
    found = parse({"quantization_config": {"config_groups": {"a": group, "b": other}}})
    assert found.scheme("x") == QuantScheme(8, True, "block", 128, type="float")
    assert found.scheme("x.down") == PRESETS["NVFP4A16"]


def test_classes_of_modules_by_their_names() -> None:
    """vLLM's name for a packed embedding; "Linear" does not mean it."""
    weights = {"num_bits": 4, "group_size": 32}
    groups = {"a": {"targets": ["Linear"], "weights": weights}}
    embedding = "model.embed_tokens"
    found = parse({"quantization_config": {"config_groups": groups}})
    assert found.scheme("model.layers.0.mlp.up_proj") == G4
    assert found.scheme(embedding) is None
    groups["b"] = {"targets": ["Embedding"], "weights": {**weights, "num_bits": 8}}
    found = parse({"quantization_config": {"config_groups": groups}})
    assert found.scheme(embedding) == found.scheme("transformer.wte") == G8
    assert found.scheme("model.layers.0.mlp.up_proj") == G4
    ignored = parse({"quantization_config": {"config_groups": groups, "ignore": [embedding]}})
    assert ignored.scheme(embedding) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            r"transform_config is {.*hadam.*; weights that are read without these transforms are",
        ),
        ({"transform_config": "hadamard"}, r"transform_config is 'hadamard'; it must be a mapping"),
        (
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            r"sparsity_config.format is 'sparse-24-bitmask'; this version reads None, 'dense'",
        ),
    ],
)
def test_what_changes_weights_beside_the_groups(change: dict[str, Any], message: str) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}
    block = {"config_groups": {"a": group}}
    for empty in ({"transform_config": {}}, {"sparsity_config": {"format": "dense"}}):
        assert parse({"quantization_config": {**block, **empty}}).scheme("a.b") == G4
    with pytest.raises(CheckpointError, match=message):
        parse({"quantization_config": {**block, **change}})
