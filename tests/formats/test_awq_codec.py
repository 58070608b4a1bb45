import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.errors import CheckpointError, RecipeError
from compress.formats.awq import codec as awq
from compress.formats.storage import WeightStorage
from compress.quant.scheme import PRESETS, QuantScheme
from compress.quant.tensor import QuantizedTensor
from helpers.compressed_models import encoded, round_weight

NAME = "model.layers.0.mlp.down_proj.weight"
MODULE = NAME.removesuffix(".weight")
CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}


@st.composite
def weights(draw: st.DrawFn) -> QuantizedTensor:
    """Random codes, zero points and scales of every scheme and shape that the format takes."""
    size = draw(st.sampled_from([0, 16, 32, 64]))
    granularity = "group" if size else "channel"
    scheme = QuantScheme(symmetric=draw(st.booleans()), granularity=granularity, group_size=size)
    n, k = draw(st.integers(1, 5)) * 8, draw(st.integers(1, 4)) * (size or draw(st.integers(1, 30)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(-8, 8, shape, generator=generator).to(torch.int8)

    groups = scheme.groups(k)
    scale = torch.rand(n, groups, generator=generator).half()
    zero = None if scheme.symmetric else codes(n, groups)
    return QuantizedTensor(codes(n, k), scale, zero, None, scheme)


@settings(max_examples=100, deadline=None)
@given(tensor=weights())
def test_round_trip_is_exact(tensor: QuantizedTensor) -> None:
    assert awq.why_not(tensor.scheme, tensor.shape) is None
    parts = encoded(awq, NAME, tensor)
    planned = awq.layout(WeightStorage(NAME, tensor.shape, tensor.scheme, "BF16"))
    assert [(x, CODES[t.dtype], tuple(t.shape)) for x, t in parts.items()] == planned
    assert all(part.is_contiguous() for part in parts.values())
    parts = load(save(parts))  # with the strides of a file's tensors, also where one side is 1
    back = awq.decode(NAME, tensor.scheme, parts.__contains__, parts.__getitem__)
    assert torch.equal(back.codes, tensor.codes)
    assert back.scale.dtype == torch.float16
    assert torch.equal(back.scale, tensor.scale)
    if tensor.zero is None:
        assert back.zero is None
    else:
        assert back.zero is not None
        assert torch.equal(back.zero, tensor.zero)
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    assert awq.weight_shape(MODULE, tensor.scheme, shapes.get) == tensor.shape


def test_words_are_those_of_the_format() -> None:
    """Rows 0 to 7 of a column, as unsigned codes 0 to 7, lie in the order of the kernels."""
    codes = torch.arange(-8, 0, dtype=torch.int8).view(8, 1)
    scheme = QuantScheme(granularity="channel", group_size=0)
    tensor = QuantizedTensor(codes, torch.ones(8, 1).half(), None, None, scheme)
    parts = encoded(awq, NAME, tensor)
    assert parts[f"{MODULE}.qweight"].tolist() == [[0x75316420]]
    assert parts[f"{MODULE}.qzeros"].tolist() == [[0x88888888 - 2**32]]


def test_a_symmetric_weight_reads_as_zero_points_in_the_middle() -> None:
    """Its config says zero_point, so that is how its scheme comes back: the same weights."""
    tensor = round_weight(torch.randn(16, 64).half(), QuantScheme(group_size=32))
    parts = encoded(awq, NAME, tensor)
    scheme = QuantScheme(symmetric=False, group_size=32)
    back = awq.decode(NAME, scheme, parts.__contains__, parts.__getitem__)
    assert torch.equal(back.dequantize(), tensor.dequantize())
    assert back.zero is not None
    assert not back.zero.any()


@pytest.mark.parametrize(
    ("scheme", "shape", "g_idx", "message"),
    [
        (PRESETS["NVFP4A16"], None, False, "integer weights with unquantized inputs, not nvfp4"),
        (PRESETS["W8A16"], None, False, "it holds 4 bits, not 8; use gptq"),
        (QuantScheme(), None, True, "it has no act-order; use gptq"),
        (QuantScheme(granularity="tensor", group_size=0), None, False, "granularity 'channel'"),
        (QuantScheme(group_size=256), None, False, "take groups of 16, 32, 64, 128, not of 256"),
        (QuantScheme(), (12, 128), False, "packed by 8, which does not divide 12"),
        (QuantScheme(), (16, 192), False, "128 does not divide 192 columns; use gptq"),
    ],
)
def test_refusals_name_what_can_hold_it(
    scheme: QuantScheme, shape: tuple[int, int] | None, g_idx: bool, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        awq.layout(WeightStorage(NAME, shape or (64, 128), scheme, "F16", act_order=g_idx))


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("qweight", None, r"needs tensor .*qweight, which is missing"),
        ("qzeros", None, r"needs tensor .*qzeros, which is missing"),
        ("qweight", torch.zeros(60, 2).int(), r"a weight of 60 columns, which .* does not divide"),
        ("qweight", torch.zeros(0, 2).int(), r"a weight of 0 columns"),
        ("qzeros", torch.zeros(2, 3).int(), r"qzeros is int32 \[2, 3\] where .* int32 \[2, 2\]"),
        ("scales", torch.zeros(2, 16).int(), r"scales is int32 \[2, 16\] where .* needs float16"),
    ],
)
def test_what_is_malformed_is_named(part: str, value: torch.Tensor | None, message: str) -> None:
    scheme = QuantScheme(symmetric=False, group_size=32)
    parts = encoded(awq, NAME, round_weight(torch.randn(16, 64).half(), scheme))
    del parts[f"{MODULE}.{part}"]
    if value is not None:
        parts[f"{MODULE}.{part}"] = value
    with pytest.raises(CheckpointError, match=message):
        awq.decode(NAME, scheme, parts.__contains__, parts.__getitem__)


def test_zero_points_that_the_config_denies_are_refused() -> None:
    scheme = QuantScheme(symmetric=False, group_size=32)
    tensor = round_weight(torch.randn(16, 64).half(), scheme)
    parts = encoded(awq, NAME, tensor)
    with pytest.raises(CheckpointError, match=r"other than 8 though zero_point is false"):
        awq.decode(NAME, QuantScheme(group_size=32), parts.__contains__, parts.__getitem__)
