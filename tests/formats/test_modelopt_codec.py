"""ModelOpt: round trips of all shapes, bytes, factors of inputs, refusals, both configs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from compress.arch.describe import describe
from compress.arch.spec import DecoderSpec, LinearSpec
from compress.arch.text_config import TEXT_CONFIGS
from compress.checkpoint.quant_file import HF_QUANT_CONFIG, completed, with_quant_file
from compress.checkpoint.shards.dtypes import DTYPE_CODES
from compress.errors import CheckpointError, RecipeError
from compress.formats.kv_cache import FP8_CACHE, INT8_CACHE, is_cache_tensor, scales_in
from compress.formats.modelopt import decode as modelopt_decode
from compress.formats.modelopt import encode as modelopt
from compress.formats.modelopt.config import ALGORITHMS, algorithm
from compress.formats.storage import WeightStorage
from compress.quant.activations import fake_quantize
from compress.quant.scheme import PRESETS, QuantScheme
from compress.quant.tensor import QuantizedTensor
from helpers import tiny_models
from helpers.compressed_models import encoded, round_weight

MODULE = "model.layers.0.mlp.down_proj"
NAME = f"{MODULE}.weight"
G4 = QuantScheme(group_size=8)
SQ = ALGORITHMS["W8A8_SQ_PER_CHANNEL"]


def decode(scheme: QuantScheme, parts: dict[str, Tensor]) -> QuantizedTensor:
    return modelopt_decode.decode(NAME, scheme, parts.__contains__, parts.__getitem__)


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    n, k = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n * 100 + k)).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    scheme=st.sampled_from([*ALGORITHMS.values(), G4, QuantScheme(group_size=1)]),
    weight=weights(),
)
def test_round_trip_is_exact(scheme: QuantScheme, weight: Tensor) -> None:
    if scheme.granularity == "group":
        weight = weight.repeat(2, scheme.group_size)
    tensor, shape = round_weight(weight, scheme), (weight.shape[0], weight.shape[1])
    assert modelopt.why_not(scheme, shape) is None
    parts = encoded(modelopt, NAME, tensor)
    planned = modelopt.layout(WeightStorage(NAME, shape, scheme, DTYPE_CODES[weight.dtype]))
    assert [(x, DTYPE_CODES[t.dtype], tuple(t.shape)) for x, t in parts.items()] == planned
    assert all(t.is_contiguous() for t in parts.values())
    assert set(parts) <= {f"{MODULE}.{part}" for part in ("weight", *modelopt.PARTS)}
    shape_of = {name: tuple(t.shape) for name, t in parts.items()}.get
    assert modelopt_decode.weight_shape(MODULE, scheme, shape_of) == shape
    back = decode(scheme, parts)
    assert back.codes.dtype == tensor.codes.dtype
    assert torch.equal(back.codes.view(torch.uint8), tensor.codes.view(torch.uint8))
    assert torch.equal(back.scale.float(), tensor.scale.float())
    assert back.input_scale == tensor.input_scale
    if scheme.is_fp4:
        assert tensor.global_scale is not None
        assert torch.equal(back.global_factor, 1 / tensor.global_scale)  # type: ignore[arg-type]
        again = decode(scheme, encoded(modelopt, NAME, back))
        assert torch.equal(again.dequantize(), back.dequantize())
    else:
        assert torch.equal(back.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (200, 130), (129, 300)])
def test_blocks_of_128_with_edges(shape: tuple[int, int]) -> None:
    scheme = ALGORITHMS["FP8_PB_WO"]
    tensor = round_weight(torch.randn(shape), scheme)
    parts = encoded(modelopt, NAME, tensor)
    rows, columns = scheme.scale_shape(*shape)
    assert parts[f"{MODULE}.weight_scale"].shape == (rows, 1, columns, 1)
    assert torch.equal(decode(scheme, parts).dequantize(), tensor.dequantize())
    if (rows, columns) == (1, 1):  # ModelOpt squeezes what is one number
        parts[f"{MODULE}.weight_scale"] = parts[f"{MODULE}.weight_scale"].reshape(())
        assert torch.equal(decode(scheme, parts).dequantize(), tensor.dequantize())


def test_nibbles_of_all_pairs_of_rows() -> None:
    values = torch.arange(-8, 8, dtype=torch.int8)
    pairs = torch.cartesian_prod(values, values).t().contiguous()  # [2, 256]
    packed = modelopt.pack_rows(pairs)
    want = [(low & 15) | (high & 15) << 4 for low, high in pairs.t().tolist()]
    assert packed.tolist() == [want]
    assert torch.equal(modelopt_decode.unpack_rows(packed), pairs)


def test_the_global_scale_is_turned() -> None:
    tensor = round_weight(torch.randn(2, 16), PRESETS["NVFP4A16"])
    tensor = replace(tensor, global_scale=torch.tensor([3.0]))
    second = encoded(modelopt, NAME, tensor)[f"{MODULE}.weight_scale_2"]
    assert second.item() == torch.tensor(1 / 3).item()


FACTOR = torch.tensor([0.5, 2.0, 1.0, 3.0] * 2)


@pytest.mark.parametrize("scheme", [G4, SQ, ALGORITHMS["FP8"]], ids=QuantScheme.describe)
def test_factors_of_inputs(scheme: QuantScheme) -> None:
    """As its runtimes compute: inputs times factor, rounded, times the plain weight."""
    tensor = round_weight(torch.randn(4, 8), scheme)
    parts = {**encoded(modelopt, NAME, tensor), f"{MODULE}.pre_quant_scale": FACTOR}
    back = decode(scheme, parts)
    assert torch.equal(back.dequantize(), tensor.dequantize() * FACTOR)
    x, plain = torch.randn(3, 8), tensor.dequantize()
    found = modelopt_decode.inputs(MODULE, scheme, parts.__contains__, parts.__getitem__)
    if scheme.activation is None:
        assert found is None
        return
    assert found is not None
    without = tensor.inputs()
    assert without is not None
    theirs = fake_quantize(x * FACTOR, without) @ plain.t()
    for how in (found, back.inputs()):
        assert how is not None
        ours = fake_quantize(x, how) @ back.dequantize().t()
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_factors_are_not_written() -> None:
    tensor = replace(round_weight(torch.randn(4, 8), G4), input_factor=FACTOR)
    message = rf"^{NAME}: format 'modelopt': .*multiplied by a pre_quant_scale.*; use format dense$"
    with pytest.raises(RecipeError, match=message):
        encoded(modelopt, NAME, tensor)


def test_factors_of_one_are_none() -> None:
    parts = encoded(modelopt, NAME, round_weight(torch.randn(4, 8), G4))
    parts[f"{MODULE}.pre_quant_scale"] = torch.ones(8)
    assert decode(G4, parts).input_factor is None


@pytest.mark.parametrize(
    ("scheme", "changes", "message"),
    [
        (G4, {"weight": torch.zeros(2, 16).char()}, r"int8 \[2, 16\] .* needs uint8 \[rows"),
        (G4, {"weight": torch.zeros(2, 12).byte()}, r"its 12 columns divide by no group of 8; gro"),
        (G4, {"weight_scale": None}, r"needs tensor .*weight_scale, which is missing"),
        (
            G4,
            {"weight_scale": torch.ones(4, 1)},
            r"\[4, 1\] where groups of 8 need \[4, 2\]; gr",
        ),
        (G4, {"weight_scale": torch.ones(4, 2).int()}, r"int32 \[4, 2\] where"),
        (G4, {"pre_quant_scale": torch.ones(4)}, r"is float32 \[4\] where .* \[16\]; the"),
        (G4, {"pre_quant_scale": -torch.ones(16)}, r"must hold a positive number"),
        (SQ, {"input_scale": None}, r"needs tensor .*input_scale, which is missing"),
        (SQ, {"weight": torch.zeros(4, 16).byte()}, r"uint8 .* needs int8"),
        (SQ, {"weight_scale": torch.ones(4, 1)}, r"\[4, 1\] where .* \[4\]"),
        (PRESETS["FP8"], {"weight_scale": torch.ones(4)}, r"is float32 \[4\] where .* \[1\]; the"),
        (PRESETS["NVFP4A16"], {"weight_scale_2": None}, r"weight_scale_2, which is missing"),
        (PRESETS["NVFP4A16"], {"weight_scale": torch.ones(4, 1)}, r"float32 .* float8_e4m3fn"),
        (PRESETS["NVFP4A16"], {"weight": torch.zeros(4, 4).byte()}, r"its 8 columns divide by no"),
    ],
)
def test_what_does_not_belong_together_is_named(
    scheme: QuantScheme, changes: dict[str, Tensor | None], message: str
) -> None:
    parts = encoded(modelopt, NAME, round_weight(torch.randn(4, 16), scheme))
    for suffix, value in changes.items():
        parts.pop(f"{MODULE}.{suffix}", None)
        if value is not None:
            parts[f"{MODULE}.{suffix}"] = value
    with pytest.raises(CheckpointError, match=message) as caught:
        decode(scheme, parts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "shape", "message"),
    [
        (PRESETS["W4A16_ASYM"], (4, 128), "symmetric throughout; use awq, gptq or compressed"),
        (PRESETS["FP8_BLOCK"], (4, 128), "go with unquantized inputs; use format fp8"),
        (PRESETS["W8A8"], (4, 128), "int8 sym channel a8; use compressed-.* W8A8_STATIC"),
        (PRESETS["W3A16"], (4, 128), "no algorithm for int3 sym g128; use compressed-tensors"),
        (PRESETS["W4A16"], (4, 200), "200 columns divide by no group of 128; use"),
        (PRESETS["W4A16"], (3, 128), "packs 4-bit rows by two, which does not divide 3 rows; use"),
        (PRESETS["NVFP4A16"], (4, 40), "40 columns divide by no group of 16; use"),
    ],
)
def test_refusals_name_what_can(scheme: QuantScheme, shape: tuple[int, int], message: str) -> None:
    with pytest.raises(RecipeError, match=f"^{NAME}: format 'modelopt': .*{message}") as caught:
        modelopt.layout(WeightStorage(NAME, shape, scheme, "BF16"))
    assert "\n" not in str(caught.value)


def test_act_order_has_no_place() -> None:
    found = modelopt.why_not(G4, g_idx=True)
    assert found == "it has no act-order; use act_order 'static', or compressed-tensors"


Llama = tuple[DecoderSpec, dict[str, tuple[int, ...]]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    folder = tiny_models.make("llama", tmp_path_factory.mktemp("llama"))
    tensors = load_file(folder / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return describe(json.loads((folder / "config.json").read_text()), shapes), shapes


def mixed(linear: LinearSpec) -> QuantScheme | None:
    if linear.role in "qkv":
        return ALGORITHMS["FP8"]
    return {"o": None, "down": G4}.get(linear.role, PRESETS["NVFP4A16"])


@pytest.mark.parametrize("cache", [None, FP8_CACHE, INT8_CACHE])
@pytest.mark.parametrize(
    "scheme", [*ALGORITHMS.values(), G4, mixed], ids=[*ALGORITHMS, "G4", "mixed"]
)
def test_both_files_read_back(scheme: Any, cache: Any, llama: Llama) -> None:
    spec, shapes = llama
    chosen = {x.tensor: mixed(x) if scheme is mixed else scheme for x in spec.linears()}
    wanted = {name: found for name, found in chosen.items() if found is not None}
    block = modelopt.quantization_config(spec, shapes, wanted, kv_cache=cache)
    assert block is not None
    side = modelopt.side_file(block)
    assert side["quantization"]["exclude_modules"] == block["ignore"]
    for said in (block, side):
        schemes = modelopt.read_schemes({"quantization_config": json.loads(json.dumps(said))})
        assert {x.tensor: schemes.scheme(x.name) for x in spec.linears()} == chosen
        assert schemes.scheme("lm_head") is None
        assert schemes.kv_cache == cache


def test_what_modelopt_itself_says() -> None:
    """Both files of nvidia-modelopt 0.47 for INT4_AWQ_CFG in groups of 64: only one has them."""
    ignored = ["lm_head", "model.embed_tokens", "model.vision.*"]
    block = {"ignore": ignored, "quant_algo": "W4A16_AWQ", "quant_method": "modelopt"}
    words = {"group_size": 64, "has_zero_point": False, "pre_quant_scale": True}
    side = {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {
            "quant_algo": "W4A16_AWQ",
            "kv_cache_quant_algo": None,
            **words,
            "exclude_modules": ignored,
        },
    }
    config = {"quantization_config": block}
    assert modelopt.read_schemes(config).scheme(MODULE) == PRESETS["W4A16"]
    for whole in (completed(config, side), completed({"model_type": "llama"}, side)):
        found = modelopt.read_schemes(whole)
        assert found.scheme(MODULE) == QuantScheme(group_size=64)
        assert found.scheme("model.vision.0.q") is None
    assert completed(config, {}) == completed(config, {"quantization": 1}) == config


def test_the_other_file_is_found(tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_type": "llama"}
    assert with_quant_file(tmp_path, config) == config
    side = {"quantization": {"quant_algo": "FP8"}}
    (tmp_path / HF_QUANT_CONFIG).write_text(json.dumps(side))
    said = {"quant_method": "modelopt", **side}
    assert with_quant_file(tmp_path, config) == {**config, "quantization_config": said}
    others = {"quantization_config": {"quant_method": "gptq"}}
    assert with_quant_file(tmp_path, others) == others
    for key in TEXT_CONFIGS:
        inner = {key: others}
        assert with_quant_file(tmp_path, inner) == inner
    (tmp_path / HF_QUANT_CONFIG).write_text("{")
    with pytest.raises(CheckpointError, match=f"{HF_QUANT_CONFIG}:1:2 is not valid JSON"):
        with_quant_file(tmp_path, config)


def test_small_letters_and_fp4_inputs() -> None:
    for name, scheme in (("fp8_pb_wo", "FP8_PB_WO"), ("NVFP4", "W4A16_NVFP4")):
        block = {"quant_method": "modelopt", "quant_algo": name, "ignore": []}
        found = modelopt.read_schemes({"quantization_config": block}).scheme(MODULE)
        assert found == ALGORITHMS[scheme]


def test_ignored_names_have_wildcards_and_no_other_patterns() -> None:
    block = {"quant_method": "modelopt", "quant_algo": "FP8"}
    for entry, ignored in {
        **{"*.down_proj": True, "model.layers.[01].*": True, MODULE: True},
        **{"re:.*": False, "re:.*down_proj": False, "re:(": False, "down_proj": False},
    }.items():
        config = {"quantization_config": {**block, "ignore": [entry, "lm_head"]}}
        assert (modelopt.read_schemes(config).scheme(MODULE) is None) == ignored, entry


def test_algorithms_are_told_apart() -> None:
    assert {name: algorithm(scheme) for name, scheme in ALGORITHMS.items()} == {
        name: name for name in ALGORITHMS
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_algo": None}, r"quant_algo is None; this version reads 'FP8'"),
        ({"quant_algo": "W4A8_AWQ"}, r"quant_algo is 'W4A8_AWQ'; this version reads"),
        ({"quant_algo": "MIXED_PRECISION"}, r"quantized_layers is None; it must be a mapping"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": 4}}},
            r"quantized_layers.a.quant_algo is 4; this version reads",
        ),
        ({"quant_algo": "W4A16_AWQ", "group_size": "x"}, r"group_size is 'x'; it must be a whole"),
        ({"quant_algo": "W4A16_AWQ", "group_size": 0}, r"group_size is 0; a group holds 1"),
        ({"quant_algo": "NVFP4", "group_size": 32}, r"group_size is 32; this version reads 16"),
        ({"has_zero_point": True}, r"has_zero_point is True; this version reads False"),
        ({"kv_cache_scheme": "NVFP4"}, r"kv_cache_scheme is 'NVFP4'; this version reads None"),
        ({"kv_cache_scheme": {"num_bits": 4}}, r"kv_cache_scheme.num_bits is 4"),
        ({"ignore": "lm_head"}, r"ignore is 'lm_head'; it must be a list"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"re:(": {"quant_algo": "FP8"}}},
            r"quantized_layers has 're:\('; it must name modules",
        ),
        ({"quantization": 3}, r"quantization is 3; it must be a mapping"),
        ({"transposed": 3}, r"transposed must be a list"),
    ],
)
def test_malformed_configs(changes: dict[str, Any], message: str) -> None:
    whole = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": []}
    with pytest.raises(CheckpointError, match=message) as caught:
        modelopt.read_schemes({"quantization_config": {**whole, **changes}})
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="has no quantization_config"):
        modelopt.read_schemes({})


def test_a_cache_goes_with_quantized_weights(llama: Llama) -> None:
    spec, shapes = llama
    assert modelopt.quantization_config(spec, shapes, {}) is None
    with pytest.raises(RecipeError, match="kv_cache: modelopt has no word for a quantized cache"):
        modelopt.quantization_config(spec, shapes, {}, kv_cache=FP8_CACHE)
    odd = replace(FP8_CACHE, type="int", bits=4)
    with pytest.raises(RecipeError, match="kv_cache: a4 static cannot be stored"):
        modelopt.quantization_config(spec, shapes, {NAME: G4}, kv_cache=odd)


def test_scales_of_the_cache(llama: Llama) -> None:
    spec, _ = llama
    one = torch.tensor([0.5], dtype=torch.bfloat16)
    parts = modelopt.kv_encode(spec.blocks[0], one, one * 2)
    planned = modelopt.kv_layout(spec, "BF16")
    assert [(x, DTYPE_CODES[t.dtype], tuple(t.shape)) for x, t in parts.items()] == planned[:2]
    assert [name for name, _, _ in planned[:2]] == [
        "model.layers.0.self_attn.k_proj.k_scale",
        "model.layers.0.self_attn.v_proj.v_scale",
    ]
    assert all(is_cache_tensor(name) for name in parts)
    assert scales_in(spec.blocks[0], parts) == tuple(parts)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        *("quant_algo", "ignore", "group_size", "kv_cache_scheme", "quantized_layers"),
        *("has_zero_point", "transposed", "quantization", "exclude_modules"),
    ]
)


@settings(max_examples=80, deadline=None)
@given(
    algo=st.sampled_from([*ALGORITHMS, "MIXED_PRECISION", "NVFP4"]),
    changes=st.dictionaries(KEYS, JSON, min_size=1, max_size=3),
)
def test_any_config_is_read_or_refused(algo: str, changes: dict[str, Any]) -> None:
    layers = {MODULE: {"quant_algo": "FP8"}}
    block = {"quant_method": "modelopt", "quant_algo": algo, "quantized_layers": layers}
    try:
        schemes = modelopt.read_schemes({"quantization_config": {**block, **changes}})
    except CheckpointError:
        return
    assert schemes.scheme(MODULE) in (None, *ALGORITHMS.values()) or "group_size" in changes
