"""Block FP8: round trips of all shapes, other tools' forms, refusals, its config both ways."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from compress.arch.describe import describe
from compress.arch.spec import DecoderSpec
from compress.checkpoint.shards.dtypes import DTYPE_CODES
from compress.errors import CheckpointError, RecipeError
from compress.formats.fp8 import codec as fp8
from compress.formats.storage import WeightStorage
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from compress.quant.tensor import QuantizedTensor
from helpers import tiny_models
from helpers.compressed_models import encoded, round_weight

MODULE = "model.layers.0.mlp.down_proj"
NAME = f"{MODULE}.weight"
BLOCK, STATIC = PRESETS["FP8_BLOCK"], PRESETS["FP8"]
DYNAMIC = replace(STATIC, activation=ActivationScheme(type="float"))


def block(size: int) -> QuantScheme:
    inputs = ActivationScheme(type="float", granularity="group", group_size=size)
    return replace(BLOCK, group_size=size, activation=inputs)


def decode(scheme: QuantScheme, parts: dict[str, Tensor]) -> QuantizedTensor:
    return fp8.decode(NAME, scheme, parts.__contains__, parts.__getitem__)


@settings(max_examples=80, deadline=None)
@given(
    scheme=st.sampled_from([block(1), block(4), block(5), block(32), STATIC, DYNAMIC]),
    n=st.integers(1, 40),
    k=st.integers(1, 40),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_round_trip_is_exact(scheme: QuantScheme, n: int, k: int, dtype: torch.dtype) -> None:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * 100 + k)).to(dtype)
    tensor = round_weight(weight, scheme)
    assert fp8.why_not(scheme, (n, k)) is None
    parts = encoded(fp8, NAME, tensor)
    planned = fp8.layout(WeightStorage(NAME, (n, k), scheme, DTYPE_CODES[dtype]))
    assert [(x, DTYPE_CODES[t.dtype], tuple(t.shape)) for x, t in parts.items()] == planned
    assert all(t.is_contiguous() for t in parts.values())
    assert set(parts) <= {f"{MODULE}.{part}" for part in ("weight", *fp8.PARTS)}
    shape_of = {name: tuple(t.shape) for name, t in parts.items()}.get
    assert fp8.weight_shape(MODULE, scheme, shape_of) == (n, k)
    back = decode(scheme, parts)
    assert torch.equal(back.codes.view(torch.uint8), tensor.codes.view(torch.uint8))
    assert torch.equal(back.scale, tensor.scale.float())
    assert torch.equal(back.dequantize(), tensor.dequantize())
    assert back.input_scale == tensor.input_scale


@pytest.mark.parametrize("shape", [(128, 128), (200, 300), (1, 129), (257, 64)])
def test_blocks_of_128_with_edges(shape: tuple[int, int]) -> None:
    tensor = round_weight(torch.randn(shape), BLOCK)
    parts = encoded(fp8, NAME, tensor)
    rows, columns = -(-shape[0] // 128), -(-shape[1] // 128)
    scale = parts[f"{MODULE}.weight_scale_inv"]
    assert scale.shape == (rows, columns)
    weight = decode(BLOCK, parts).dequantize()
    last = weight[128 * (rows - 1) :, 128 * (columns - 1) :]
    codes = tensor.codes[128 * (rows - 1) :, 128 * (columns - 1) :].float()
    assert torch.equal(last, codes * scale[-1, -1])


def test_the_inverse_is_a_factor() -> None:
    parts = {
        NAME: torch.tensor([[2.0, -3.0]]).to(torch.float8_e4m3fn),
        f"{MODULE}.weight_scale_inv": torch.tensor([[0.5]]),
    }
    assert decode(BLOCK, parts).dequantize().tolist() == [[1.0, -1.5]]


def test_scales_of_other_tools() -> None:
    codes = torch.ones(4, 8).to(torch.float8_e4m3fn)
    powers = torch.tensor([[0.25]]).to(torch.float8_e8m0fnu)
    back = decode(block(8), {NAME: codes, f"{MODULE}.weight_scale_inv": powers})
    assert back.scale.tolist() == [[0.25]]
    halves = torch.tensor([[0.5]], dtype=torch.bfloat16)
    back = decode(block(8), {NAME: codes, f"{MODULE}.weight_scale_inv": halves})
    assert back.scale.dtype == torch.bfloat16
    names = {  # what transformers calls them
        NAME: codes,
        f"{MODULE}.weight_scale_inv": torch.tensor(0.5),
        f"{MODULE}.activation_scale": torch.tensor(0.125),
    }
    back = decode(STATIC, names)
    assert back.scale.tolist() == [[0.5]]
    assert back.input_scale is not None
    assert back.input_scale.tolist() == [0.125]
    found = fp8.inputs(MODULE, STATIC, names.__contains__, names.__getitem__)
    assert found is not None
    assert found.scale is not None
    assert found.scale.tolist() == [0.125]


CODES = torch.ones(4, 8).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("scheme", "changes", "message"),
    [
        (block(4), {"weight_scale_inv": None}, r"needs tensor .*weight_scale_inv, which is miss"),
        (block(4), {"weight_scale_inv": torch.ones(1, 1)}, r"\[1, 1\] where .* float.* \[1, 2\]"),
        (block(4), {"weight_scale_inv": torch.ones(1, 2).int()}, r"is int32 \[1, 2\] where"),
        (block(4), {"weight": torch.ones(4, 8)}, r"is float32 \[4, 8\] .*needs float8_e4m3fn"),
        (block(4), {"weight": CODES[0]}, r"needs float8_e4m3fn \[rows, columns\]"),
        (STATIC, {"weight_scale": None}, r"weight_scale_inv or weight_scale, which is missing"),
        (STATIC, {"input_scale": None}, r"input_scale or activation_scale, which is missing"),
        (STATIC, {"input_scale": torch.zeros(())}, r"it must hold one positive number"),
        (DYNAMIC, {"weight_scale": torch.ones(4)}, r"\[4\] where fp8 tensor a-fp8 needs .* \[1\];"),
    ],
)
def test_what_does_not_belong_together_is_named(
    scheme: QuantScheme, changes: dict[str, Tensor | None], message: str
) -> None:
    parts = encoded(fp8, NAME, round_weight(torch.randn(4, 8), scheme))
    for suffix, value in changes.items():
        parts.pop(f"{MODULE}.{suffix}")
        if value is not None:
            parts[f"{MODULE}.{suffix}"] = value
    with pytest.raises(CheckpointError, match=message) as caught:
        decode(scheme, parts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (PRESETS["W4A16"], "holds 8-bit floats only, not int4 sym g128"),
        (PRESETS["NVFP4A16"], "holds 8-bit floats only, not nvfp4"),
        (PRESETS["FP8_DYNAMIC"], "one scale a block or a tensor, not fp8 channel"),
        (replace(BLOCK, activation=None), "its inputs are FP8 as well, unlike fp8 block128"),
        (replace(BLOCK, group_size=64), "beside blocks of 64 its inputs have dynamic groups of 64"),
        (replace(BLOCK, activation=ActivationScheme()), "its inputs are FP8 as well"),
        (
            replace(STATIC, activation=ActivationScheme(type="float", granularity="tensor")),
            "its dynamic inputs have a scale a token",
        ),
    ],
)
def test_refusals_name_what_can(scheme: QuantScheme, message: str) -> None:
    with pytest.raises(RecipeError, match=f"^{NAME}: format 'fp8': .*{message}.*; use") as caught:
        fp8.layout(WeightStorage(NAME, (256, 256), scheme, "BF16"))
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[DecoderSpec, dict[str, Any]]:
    folder = tiny_models.make("llama", tmp_path_factory.mktemp("llama"))
    tensors = load_file(folder / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return describe(json.loads((folder / "config.json").read_text()), shapes), shapes


@pytest.mark.parametrize("scheme", [BLOCK, block(32), STATIC, DYNAMIC], ids=QuantScheme.describe)
def test_config_reads_back(scheme: QuantScheme, llama: Any) -> None:
    spec, shapes = llama
    wanted = {x.tensor: scheme for x in spec.linears() if x.role != "down"}
    found = fp8.quantization_config(spec, shapes, wanted)
    assert found is not None
    schemes = fp8.read_schemes({"quantization_config": found})
    assert schemes.scheme("model.layers.0.self_attn.q_proj") == scheme
    assert schemes.scheme(MODULE) is None
    assert schemes.scheme("lm_head") is None
    ignored = {MODULE, MODULE.replace("0", "1"), "lm_head"}
    assert set(found["ignored_layers"]) == set(found["modules_to_not_convert"]) == ignored
    assert "weight_block_size" in found


def test_ignored_names_begin_and_end_at_dots() -> None:
    words = {"modules_to_not_convert": ["model.layers.1", "gate", "visual.*", "a*z"]}
    read = fp8.read_schemes(
        {"quantization_config": {"activation_scheme": "dynamic", "quant_method": "fp8", **words}}
    )
    dense = ["model.layers.1.mlp.up", "model.layers.3.mlp.gate", "gate", "visual.0.q", "a.b.z"]
    coded = ["model.layers.11.mlp.up", "model.layers.3.mlp.gate_proj", "model.layers.2.mlp.up"]
    assert [read.scheme(name) for name in dense] == [None] * len(dense)
    assert all(read.scheme(name) == DYNAMIC for name in coded)


def test_one_scheme_for_all(llama: Any) -> None:
    spec, shapes = llama
    schemes = dict(zip((x.tensor for x in spec.linears()), (BLOCK, STATIC), strict=False))
    with pytest.raises(RecipeError, match="one scheme for all layers, there are fp8 block128"):
        fp8.quantization_config(spec, shapes, schemes)
    with pytest.raises(RecipeError, match="kv_cache: fp8 has no word"):
        fp8.quantization_config(spec, shapes, {}, kv_cache=STATIC.activation)
    assert fp8.quantization_config(spec, shapes, {}) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_scheme": None}, r"activation_scheme is None; this version reads 'dynamic'"),
        ({"activation_scheme": "static"}, r"activation_scheme is 'static'; this version reads"),
        ({"fmt": "e5m2"}, r"fmt is 'e5m2'"),
        ({"scale_fmt": 1}, r"scale_fmt is 1"),
        ({"expert_dtype": "fp4"}, r"expert_dtype is 'fp4'"),
        ({"weight_block_size": [128, 64]}, r"weight_block_size is \[128, 64\]; .* square blocks"),
        ({"weight_block_size": [0, 0]}, r"square blocks"),
        ({"weight_block_size": [True, True]}, r"square blocks"),
        ({"weight_block_size": "128"}, r"square blocks"),
        ({"ignored_layers": "lm_head"}, r"ignored_layers is 'lm_head'; it must be a list"),
        ({"modules_to_not_convert": ["*" * 9]}, r"is no module name with 4 \* at most"),
        (
            {"ignored_layers": ["re:("]},
            r"ignored_layers: 're:\(' is not a regular expression: missing \)",
        ),
        ({"transposed": 3}, r"transposed must be a list"),
    ],
)
def test_malformed_configs(changes: dict[str, Any], message: str) -> None:
    whole = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    with pytest.raises(CheckpointError, match=message) as caught:
        fp8.read_schemes({"quantization_config": {**whole, **changes}})
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="has no quantization_config"):
        fp8.read_schemes({})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        *("activation_scheme", "fmt", "weight_block_size", "scale_fmt", "expert_dtype"),
        *("ignored_layers", "modules_to_not_convert", "transposed"),
    ]
)


@settings(max_examples=80, deadline=None)
@given(changes=st.dictionaries(KEYS, JSON, min_size=1, max_size=3))
def test_any_config_is_read_or_refused(changes: dict[str, Any]) -> None:
    whole = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    try:
        schemes = fp8.read_schemes({"quantization_config": {**whole, **changes}})
    except CheckpointError:
        return
    scheme = schemes.scheme(MODULE)
    assert scheme is None or fp8.why_not(scheme) is None
