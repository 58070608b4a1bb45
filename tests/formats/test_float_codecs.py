"""Floats and static inputs in compressed-tensors: both ways, forms of other tools, refusals."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.checkpoint.shards.dtypes import DTYPE_CODES
from compress.errors import CheckpointError, RecipeError
from compress.formats import FORMATS, dense
from compress.formats.compressed_tensors import decode as ct_decode
from compress.formats.compressed_tensors import encode as compressed_tensors
from compress.formats.storage import WeightStorage
from compress.quant.fp4 import pack_fp4, unpack_fp4
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from compress.quant.tensor import QuantizedTensor
from helpers.compressed_models import E2M1, encoded, round_weight

NAME = "model.layers.0.mlp.down_proj.weight"
MODULE = NAME.removesuffix(".weight")
STATIC = ("FP8", "W8A8_STATIC")


@st.composite
def schemes(draw: st.DrawFn) -> QuantScheme:
    """Every kind of storage that is not plain integers, with all ways to treat inputs."""
    preset = PRESETS[draw(st.sampled_from(["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16"]))]
    number = st.sampled_from(["int", "float"])
    activation = draw(
        st.one_of(
            st.none(),
            st.builds(ActivationScheme, type=number),
            st.builds(
                ActivationScheme,
                type=number,
                granularity=st.just("tensor"),
                dynamic=st.booleans(),
            ),
        )
    )
    if preset.granularity == "block":
        preset = replace(preset, group_size=draw(st.sampled_from([4, 5, 128])))
    return replace(preset, activation=activation)


@settings(max_examples=80, deadline=None)
@given(
    scheme=schemes(),
    n=st.integers(1, 13),
    k=st.integers(1, 40),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_round_trip_is_exact(scheme: QuantScheme, n: int, k: int, dtype: torch.dtype) -> None:
    k = 16 * k if scheme.is_fp4 else k
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * 100 + k)).to(dtype)
    tensor = round_weight(weight, scheme)
    parts = encoded(compressed_tensors, NAME, tensor)
    planned = compressed_tensors.layout(WeightStorage(NAME, (n, k), scheme, DTYPE_CODES[dtype]))
    assert [(x, DTYPE_CODES[t.dtype], tuple(t.shape)) for x, t in parts.items()] == planned
    assert all(t.is_contiguous() for t in parts.values())
    assert set(parts) <= {f"{MODULE}.{part}" for part in ("weight", *compressed_tensors.PARTS)}
    back = decode(scheme, parts)
    assert torch.equal(back.codes.view(torch.uint8), tensor.codes.view(torch.uint8))
    assert torch.equal(back.scale.float(), tensor.scale.float())
    assert torch.equal(back.dequantize(), tensor.dequantize())
    assert back.input_scale == tensor.input_scale


def decode(scheme: QuantScheme, parts: dict[str, Tensor]) -> QuantizedTensor:
    return ct_decode.decode(NAME, scheme, parts.__contains__, parts.__getitem__)


def written(name: str, **changes: Tensor | None) -> dict[str, Tensor]:
    """Parts of a weight [4, 32] of a preset, some changed or lost."""
    parts = encoded(compressed_tensors, NAME, round_weight(torch.randn(4, 32), PRESETS[name]))
    for suffix, value in changes.items():
        if value is None:
            del parts[f"{MODULE}.{suffix}"]
        else:
            parts[f"{MODULE}.{suffix}"] = value
    return parts


def test_nibbles_of_all_pairs() -> None:
    values = torch.cat([E2M1, -E2M1])  # the nibble of each is its place
    pairs = torch.cartesian_prod(values, values).flatten()[None].to(torch.float8_e4m3fn)
    packed = pack_fp4(pairs)
    want = [low | high << 4 for low in range(16) for high in range(16)]
    assert packed.tolist() == [want]
    assert torch.equal(unpack_fp4(packed).view(torch.uint8), pairs.view(torch.uint8))


def test_codes_that_are_not_e2m1_are_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="not all E2M1 numbers"):
        pack_fp4(torch.tensor([[1.0, 5.0]]).to(torch.float8_e4m3fn))


def test_nvfp4_divides_by_the_global_scale() -> None:
    parts = {
        f"{MODULE}.weight_packed": torch.full((1, 8), 0x72, dtype=torch.uint8),  # 1, 6
        f"{MODULE}.weight_scale": torch.tensor([[2.0]]).to(torch.float8_e4m3fn),
        f"{MODULE}.weight_global_scale": torch.tensor([4.0]),
    }
    weight = decode(PRESETS["NVFP4A16"], parts).dequantize()
    assert weight.tolist() == [[0.5, 3.0] * 8]


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_number_in_any_shape(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """llm-compressor writes [1] of the weights' dtype, others [] of fp32."""
    back = decode(PRESETS[name], written(name, input_scale=torch.full(shape, 0.25, dtype=dtype)))
    assert back.input_scale is not None
    assert back.input_scale.shape == (1,)
    assert back.input_scale.item() == 0.25


def test_scales_of_other_tools() -> None:
    flat = written("FP8", weight_scale=torch.tensor(0.5))
    assert decode(PRESETS["FP8"], flat).scale.tolist() == [[0.5]]
    rows = written("FP8_DYNAMIC", weight_scale=torch.arange(1.0, 5.0))
    assert decode(PRESETS["FP8_DYNAMIC"], rows).scale.shape == (4, 1)
    whole = written("NVFP4A16", weight_global_scale=torch.tensor(8.0, dtype=torch.bfloat16))
    read = decode(PRESETS["NVFP4A16"], whole).global_scale
    assert read is not None
    assert read.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("FP8", {"input_scale": None}, r"needs tensor .*down_proj.input_scale, which is missing"),
        ("FP8", {"input_scale": torch.zeros(1)}, r"float32 \[1\] with \[0.0\]; it must hold one"),
        (
            "FP8",
            {"input_scale": torch.full((1,), torch.inf)},
            r"\[inf\]; it must hold one",
        ),
        ("W8A8_STATIC", {"input_scale": torch.ones(2)}, r"is float32 \[2\] where .* \[1\]; the"),
        (
            "W8A8_STATIC",
            {"input_scale": torch.ones(1).int()},
            r"is int32 \[1\] where int8 sym channel a8 static",
        ),
        ("FP8", {"weight": torch.randn(4, 32)}, r"is float32 \[4, 32\] .* needs float8_e4m3fn"),
        ("FP8", {"weight": torch.zeros(4, 32).char()}, r"is int8 .* needs float8_e4m3fn \[rows"),
        (
            "W8A8",
            {"weight": torch.zeros(4, 32).to(torch.float8_e4m3fn)},
            r"where .* needs int8 \[rows",
        ),
        ("FP8", {"weight_scale": torch.ones(4, 1)}, r"weight_scale is .* \[4, 1\] .* \[1, 1\]"),
        ("FP8_BLOCK", {"weight_scale": torch.ones(4, 1)}, r"is float32 \[4, 1\] .* \[1, 1\]"),
        (
            "NVFP4A16",
            {"weight_scale": torch.ones(4, 2)},
            r"is float32 .* nvfp4 needs float8_e4m3fn",
        ),
        ("NVFP4A16", {"weight_packed": torch.zeros(4, 16).int()}, r"int32 .* needs uint8 \[rows"),
        ("NVFP4A16", {"weight_packed": torch.zeros(16).byte()}, r"is uint8 \[16\] where nvfp4"),
        ("NVFP4A16", {"weight_packed": torch.zeros(4, 9).byte()}, r"18 columns, no multiple of"),
        ("NVFP4A16", {"weight_global_scale": None}, r"weight_global_scale, which is missing"),
        ("NVFP4A16", {"weight_global_scale": torch.zeros(1)}, r"must hold one positive number"),
    ],
)
def test_what_does_not_belong_together_is_named(
    name: str, changes: dict[str, Tensor | None], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        decode(PRESETS[name], written(name, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["LLM_INT8", "LLM_INT8_CALIBRATED"])
def test_outlier_columns_have_no_place(name: str) -> None:
    message = rf"^{NAME}: compressed-tensors has no place .* use output.format 'bitsandbytes'"
    with pytest.raises(RecipeError, match=message):
        compressed_tensors.layout(WeightStorage(NAME, (4, 8), PRESETS[name], "BF16"))
    assert dense.layout(WeightStorage(NAME, (4, 8), PRESETS[name], "BF16")) == [
        (NAME, "BF16", (4, 8))
    ]


def test_nvfp4_needs_whole_groups() -> None:
    with pytest.raises(RecipeError, match=r"groups of 16 columns, and 40 leave a rest; ignore"):
        compressed_tensors.layout(WeightStorage(NAME, (4, 40), PRESETS["NVFP4A16"], "BF16"))


@pytest.mark.parametrize("name", ["FP8", "FP8_BLOCK", "NVFP4A16"])
def test_dense_has_the_dtype_of_the_source(name: str) -> None:
    tensor = round_weight(torch.randn(4, 32).bfloat16(), PRESETS[name])
    codec = FORMATS["dense"]
    parts = encoded(codec, NAME, tensor, dtype=torch.bfloat16)
    assert torch.equal(parts[NAME], tensor.dequantize(torch.bfloat16))
    assert codec.layout(WeightStorage(NAME, (4, 32), tensor.scheme, "BF16")) == [
        (NAME, "BF16", (4, 32))
    ]
