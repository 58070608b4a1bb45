from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.errors import CheckpointError, RecipeError
from compress.formats import FORMATS
from compress.formats.compressed_tensors import decode as ct_decode
from compress.formats.compressed_tensors import encode as compressed_tensors
from compress.formats.compressed_tensors.encode import is_packed
from compress.formats.storage import WeightStorage
from compress.quant.scheme import ActivationScheme, QuantScheme
from compress.quant.tensor import is_trivial
from helpers.compressed_models import encoded, round_weight

NAME = "model.layers.0.mlp.down_proj.weight"
CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}


ACTIVATIONS = [None, ActivationScheme(), ActivationScheme(type="float")]


@st.composite
def schemes(draw: st.DrawFn) -> QuantScheme:
    granularity = draw(st.sampled_from(["tensor", "channel", "group"]))
    return QuantScheme(
        bits=draw(st.integers(2, 8)),
        symmetric=draw(st.booleans()),
        granularity=granularity,
        group_size=draw(st.sampled_from([4, 5, 32])) if granularity == "group" else 0,
        activation=draw(st.sampled_from(ACTIVATIONS)),
    )


@settings(max_examples=80, deadline=None)
@given(
    scheme=schemes(),
    n=st.integers(1, 21),
    k=st.integers(1, 70),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    act_order=st.booleans(),
)
def test_round_trip_is_exact(
    scheme: QuantScheme, n: int, k: int, dtype: torch.dtype, act_order: bool
) -> None:
    act_order = act_order and scheme.granularity == "group" and is_packed(scheme)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * 100 + k)).to(dtype)
    tensor = round_weight(weight, scheme, act_order=act_order)
    parts = encoded(compressed_tensors, NAME, tensor)
    planned = compressed_tensors.layout(
        WeightStorage(NAME, (n, k), scheme, CODES[dtype], act_order=act_order)
    )
    assert [(x, CODES[t.dtype], tuple(t.shape)) for x, t in parts.items()] == planned
    back = ct_decode.decode(NAME, scheme, parts.__contains__, parts.__getitem__)
    assert torch.equal(back.codes, tensor.codes)
    assert torch.equal(back.scale, tensor.scale)
    assert torch.equal(back.dequantize(), tensor.dequantize())
    assert (back.zero is None) == scheme.symmetric
    assert torch.equal(back.column_groups(), tensor.column_groups())
    assert (back.g_idx is None) == (tensor.g_idx is None or is_trivial(tensor.g_idx, scheme))


@pytest.mark.parametrize("transposed", [False, True])
def test_dense_holds_the_dequantized_weight(transposed: bool) -> None:
    tensor = round_weight(torch.randn(6, 10).bfloat16(), QuantScheme(group_size=5))
    codec = FORMATS["dense"]
    parts = encoded(codec, NAME, tensor, transposed=transposed)
    want = tensor.dequantize(torch.bfloat16)
    assert torch.equal(parts[NAME], want.t() if transposed else want)
    assert parts[NAME].is_contiguous()
    planned = codec.layout(
        WeightStorage(NAME, (6, 10), tensor.scheme, "BF16", transposed=transposed)
    )
    assert planned == [(NAME, "BF16", tuple(parts[NAME].shape))]


def test_name_without_weight_is_refused() -> None:
    tensor = round_weight(torch.randn(4, 8), QuantScheme(group_size=4))
    with pytest.raises(CheckpointError, match=r"'experts.gate_up' cannot be stored quantized"):
        encoded(compressed_tensors, "experts.gate_up", tensor)


def test_g_idx_needs_groups_and_plain_activations() -> None:
    channel = QuantScheme(granularity="channel", group_size=0)
    with pytest.raises(RecipeError, match="act_order 'group' needs a weight-only scheme with"):
        compressed_tensors.layout(WeightStorage(NAME, (4, 8), channel, "F32", act_order=True))
    integer = QuantScheme(group_size=4, activation=ActivationScheme())
    with pytest.raises(RecipeError, match="int4 sym g4 a8"):
        compressed_tensors.layout(WeightStorage(NAME, (4, 8), integer, "F32", act_order=True))


def test_missing_and_misshapen_parts_are_named() -> None:
    scheme = QuantScheme(group_size=4, symmetric=False)
    parts = encoded(compressed_tensors, NAME, round_weight(torch.randn(4, 8), scheme))
    lost = {k: v for k, v in parts.items() if not k.endswith("zero_point")}
    with pytest.raises(CheckpointError, match=r"down_proj.weight_zero_point, which is missing"):
        ct_decode.decode(NAME, scheme, lost.__contains__, lost.__getitem__)
    other = QuantScheme(group_size=2, symmetric=False)
    with pytest.raises(CheckpointError, match=r"\[4, 2\] where int4 asym g2 needs .* \[4, 4\]"):
        ct_decode.decode(NAME, other, parts.__contains__, parts.__getitem__)


def test_float_codes_are_refused() -> None:
    parts = {NAME: torch.randn(4, 8), NAME + "_scale": torch.ones(4, 1)}
    scheme = QuantScheme(bits=8, granularity="channel", group_size=0)
    with pytest.raises(
        CheckpointError, match=r"float32 \[4, 8\] where int8 sym channel needs int8"
    ):
        ct_decode.decode(NAME, scheme, parts.__contains__, parts.__getitem__)


def test_table_keys_are_the_names() -> None:
    assert all(key == codec.name for key, codec in FORMATS.items())


@pytest.mark.parametrize("activation", [None, ActivationScheme()])
def test_zero_points_of_a_symmetric_scheme_are_not_dropped_in_silence(
    activation: ActivationScheme | None,
) -> None:
    """Some tools write them, all 0 or in the middle; any other one means another scheme."""
    asymmetric = QuantScheme(bits=8, symmetric=False, group_size=4, activation=activation)
    symmetric = QuantScheme(bits=8, group_size=4, activation=activation)
    zero = f"{NAME.removesuffix('.weight')}.weight_zero_point"
    tensor = round_weight(torch.rand(4, 8), asymmetric)  # rand: zero points far from 0
    parts = encoded(compressed_tensors, NAME, tensor)
    with pytest.raises(CheckpointError, match=r"zero points other than 0 though .* symmetric"):
        ct_decode.decode(NAME, symmetric, parts.__contains__, parts.__getitem__)
    middle = encoded(compressed_tensors, NAME, replace(tensor, zero=torch.zeros(4, 2).char()))[zero]
    for none in (middle, torch.zeros(4, 2).char(), torch.zeros(4, 2).to(torch.float8_e4m3fn)):
        parts[zero] = none
        assert ct_decode.decode(NAME, symmetric, parts.__contains__, parts.__getitem__).zero is None
