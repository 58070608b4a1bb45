from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.errors import CheckpointError, RecipeError
from compress.formats.gptq import codec as gptq
from compress.formats.gptq import version2 as gptq_v2
from compress.formats.storage import WeightStorage
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from compress.quant.tensor import QuantizedTensor
from helpers.compressed_models import encoded, round_weight

NAME = "model.layers.0.mlp.down_proj.weight"
MODULE = NAME.removesuffix(".weight")
CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}
WORDS = {2: 16, 3: 32, 4: 8, 8: 4}
CODECS: Any = [gptq, gptq_v2]


@st.composite
def weights(draw: st.DrawFn) -> QuantizedTensor:
    """Random codes, zero points and scales of every scheme and shape that the format takes."""
    bits = draw(st.sampled_from([2, 3, 4, 8]))
    size = draw(st.sampled_from([0, 16, 32, 64]))
    scheme = QuantScheme(
        bits=bits,
        symmetric=draw(st.booleans()),
        granularity="group" if size else "channel",
        group_size=size,
    )
    n = draw(st.integers(1, 4)) * WORDS[bits]
    k = draw(st.integers(1, 6)) * WORDS[bits]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    groups = scheme.groups(k)
    span = (scheme.code_min, scheme.code_max + 1)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(*span, shape, generator=generator).to(torch.int8)

    order = None
    if size and groups > 1 and draw(st.booleans()):
        order = torch.randperm(k, generator=generator).to(torch.int32) // size
    scale = torch.rand(n, groups, generator=generator).half()
    zero = None if scheme.symmetric else codes(n, groups)
    return QuantizedTensor(codes(n, k), scale, zero, order, scheme)


def same(found: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    if found is None or wanted is None:
        return found is wanted
    return found.dtype == wanted.dtype and torch.equal(found, wanted)


@settings(max_examples=60, deadline=None)
@given(tensor=weights(), codec=st.sampled_from(CODECS))
def test_round_trip_is_exact(tensor: QuantizedTensor, codec: Any) -> None:
    if codec is gptq and tensor.zero is not None:
        tensor = replace(tensor, zero=tensor.zero.clamp(min=tensor.scheme.code_min + 1))
    scheme, order = tensor.scheme, tensor.g_idx is not None
    assert codec.why_not(scheme, tensor.shape, g_idx=order) is None
    parts = encoded(codec, NAME, tensor)
    planned = codec.layout(WeightStorage(NAME, tensor.shape, scheme, "BF16", act_order=order))
    assert [(x, CODES[t.dtype], tuple(t.shape)) for x, t in parts.items()] == planned
    assert all(part.is_contiguous() for part in parts.values())
    back = codec.decode(NAME, scheme, parts.__contains__, parts.__getitem__)
    assert same(back.codes, tensor.codes)
    assert same(back.scale, tensor.scale)
    assert same(back.zero, tensor.zero)
    in_order = torch.arange(tensor.shape[1]) // scheme.columns_per_scale(tensor.shape[1])
    trivial = torch.equal(tensor.column_groups(), in_order)
    assert same(back.g_idx, None if trivial else tensor.g_idx)
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    assert codec.weight_shape(MODULE, scheme, shapes.get) == tensor.shape


def test_words_are_those_of_the_format() -> None:
    """Codes -8 to 7 down a column; zero points of a symmetric weight in both versions."""
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(8, 1)  # [8, 16]
    scheme = QuantScheme(granularity="channel", group_size=0)
    tensor = QuantizedTensor(codes, torch.ones(8, 1).half(), None, None, scheme)
    first, second = (encoded(codec, NAME, tensor) for codec in CODECS)
    assert first[f"{MODULE}.qweight"][:, 0].tolist() == [0x76543210, 0xFEDCBA98 - 2**32]
    assert first[f"{MODULE}.qzeros"].tolist() == [[0x77777777]]
    assert second[f"{MODULE}.qzeros"].tolist() == [[0x88888888 - 2**32]]
    assert first[f"{MODULE}.g_idx"].tolist() == [0] * 16


def asymmetric(bits: int = 4) -> QuantizedTensor:
    scheme = QuantScheme(bits=bits, symmetric=False, group_size=32)
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(3)).half()
    return round_weight(weight, scheme)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_zero_point_of_zero_has_no_place_in_version_1(bits: int) -> None:
    tensor = asymmetric(bits)
    assert tensor.zero is not None
    tensor.zero[:] = 0
    tensor.zero[3, 1] = tensor.scheme.code_min
    with pytest.raises(RecipeError, match=r"1 of 64 zero points are 0, .* use format 'gptq_v2'"):
        encoded(gptq, NAME, tensor)
    parts = encoded(gptq_v2, NAME, tensor)
    back = gptq_v2.decode(NAME, tensor.scheme, parts.__contains__, parts.__getitem__)
    assert same(back.zero, tensor.zero)


def test_a_wrapped_zero_point_is_not_guessed_at() -> None:
    tensor = asymmetric()
    assert tensor.zero is not None
    tensor.zero[5, 0] = 7  # version 2 stores 15, which is a -1 of version 1
    parts = encoded(gptq_v2, NAME, tensor)
    with pytest.raises(CheckpointError, match=r"zero points are stored as 15, a -1 of GPTQ"):
        gptq.decode(NAME, tensor.scheme, parts.__contains__, parts.__getitem__)


def test_symmetric_zero_points_of_the_other_version_are_refused() -> None:
    tensor = round_weight(torch.randn(32, 64).half(), QuantScheme(group_size=32))
    for codec, other in ((gptq, gptq_v2), (gptq_v2, gptq)):
        parts = encoded(codec, NAME, tensor)
        with pytest.raises(CheckpointError, match=r"zero points other than 8 though sym is true"):
            other.decode(NAME, tensor.scheme, parts.__contains__, parts.__getitem__)


def test_padded_words_of_other_tools_are_read() -> None:
    """gptqmodel fills the last word where K or N does not."""
    tensor = asymmetric()
    parts = encoded(gptq_v2, NAME, tensor)
    wanted = QuantizedTensor(
        tensor.codes[:27, :43], tensor.scale[:27], None, None, tensor.scheme
    )  # N of 27 takes 4 words, K of 43 takes 6
    cut = {
        f"{MODULE}.qweight": parts[f"{MODULE}.qweight"][:6, :27].contiguous(),
        f"{MODULE}.qzeros": parts[f"{MODULE}.qzeros"][:, :4].contiguous(),
        f"{MODULE}.scales": parts[f"{MODULE}.scales"][:, :27].contiguous(),
        f"{MODULE}.g_idx": parts[f"{MODULE}.g_idx"][:43].contiguous(),
    }
    back = gptq_v2.decode(NAME, tensor.scheme, cut.__contains__, cut.__getitem__)
    assert same(back.codes, wanted.codes)
    assert same(back.scale, wanted.scale)
    assert tensor.zero is not None
    assert same(back.zero, tensor.zero[:27])


@pytest.mark.parametrize(
    ("scheme", "shape", "g_idx", "message"),
    [
        (PRESETS["FP8"], None, False, "integer weights with unquantized inputs, not fp8"),
        (PRESETS["W8A8"], None, False, "integer weights with unquantized inputs, not int8"),
        (QuantScheme(bits=5), None, False, "2, 3, 4 or 8 bits, not 5; use compressed-tensors"),
        (QuantScheme(granularity="tensor", group_size=0), None, False, "granularity 'channel'"),
        (QuantScheme(group_size=24), None, False, "take groups of 16, 32, .*, not of 24"),
        (QuantScheme(granularity="channel", group_size=0), None, True, "use act_order 'static'"),
        (QuantScheme(), (12, 128), False, r"packed by 8, which does not divide \[12, 128\]"),
        (QuantScheme(bits=3), (32, 48), False, r"packed by 32, which does not divide \[32, 48\]"),
    ],
)
def test_refusals_name_what_can_hold_it(
    scheme: QuantScheme, shape: tuple[int, int] | None, g_idx: bool, message: str
) -> None:
    for codec in CODECS:
        found = codec.why_not(scheme, shape, g_idx=g_idx)
        assert found is not None
        assert "; use " in found or ", or " in found
    with pytest.raises(RecipeError, match=message):
        gptq.layout(WeightStorage(NAME, shape or (64, 128), scheme, "F16", act_order=g_idx))


def test_float_inputs_are_not_forgotten() -> None:
    scheme = QuantScheme(activation=ActivationScheme(type="float"))
    assert gptq.why_not(scheme) is not None


def broken(part: str, value: torch.Tensor | None) -> dict[str, torch.Tensor]:
    parts = encoded(gptq_v2, NAME, asymmetric())
    del parts[f"{MODULE}.{part}"]
    return parts if value is None else {**parts, f"{MODULE}.{part}": value}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("qweight", None, r"needs tensor .*qweight, which is missing"),
        ("qzeros", None, r"needs tensor .*qzeros, which is missing"),
        ("scales", None, r"needs tensor .*scales, which is missing"),
        ("qweight", torch.zeros(8, 32), r"qweight is float32 \[8, 32\] where .* needs int32"),
        ("qweight", torch.zeros(7, 32).int(), r"has 7 rows, which 4-bit codes of 64 columns"),
        ("qweight", torch.zeros(8).int(), r"qweight is int32 \[8\] where .* \[rows, columns\]"),
        ("qweight", torch.zeros(8, 0).int(), r"qweight is \[8, 0\] where"),
        ("qzeros", torch.zeros(2, 5).int(), r"qzeros is int32 \[2, 5\] where .* int32 \[2, 4\]"),
        ("scales", torch.zeros(3, 32).half(), r"\[3, 32\] where .* needs float16 .* \[2, 32\]"),
        ("g_idx", torch.zeros(65).int(), r"has 8 rows, which 4-bit codes of 65 columns"),
        ("g_idx", torch.full((64,), 2).int(), r"g_idx holds groups 2 to 2; there are .* 0 to 1"),
        ("g_idx", torch.zeros(8, 8).int(), r"g_idx is int32 \[8, 8\] where .* needs int32 \[64\]"),
    ],
)
def test_what_is_malformed_is_named(part: str, value: torch.Tensor | None, message: str) -> None:
    parts = broken(part, value)
    scheme = asymmetric().scheme
    with pytest.raises(CheckpointError, match=message):
        gptq_v2.decode(NAME, scheme, parts.__contains__, parts.__getitem__)


def test_without_g_idx_columns_are_in_order() -> None:
    parts = broken("g_idx", None)
    tensor = asymmetric()
    back = gptq_v2.decode(NAME, tensor.scheme, parts.__contains__, parts.__getitem__)
    assert torch.equal(back.dequantize(), tensor.dequantize())
    assert gptq_v2.weight_shape(
        MODULE, tensor.scheme, {name: tuple(part.shape) for name, part in parts.items()}.get
    ) == (32, 64)
