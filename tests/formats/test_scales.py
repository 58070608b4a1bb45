"""Scales in another dtype: exact, rounded when asked, never lost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import RecipeError
from compress.formats.scales import change, fit_scales
from compress.quant.scheme import PRESETS, QuantScheme
from compress.quant.tensor import QuantizedTensor

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def weight(scale: torch.Tensor, scheme: QuantScheme | None = None) -> QuantizedTensor:
    """A weight of one group a row. scale: [N]."""
    scheme = scheme or QuantScheme(bits=8, granularity="channel", group_size=0)
    codes = torch.ones(scale.numel(), 16, dtype=torch.int8)
    return QuantizedTensor(codes, scale.reshape(-1, 1), None, None, scheme)


@given(st.lists(st.floats(2**-14, 60000, width=16), min_size=1, max_size=9))
def test_what_fits_is_only_converted(values: list[float]) -> None:
    before = weight(torch.tensor(values))
    after = fit_scales(before, F16, round_scales=False)
    assert after.scale.dtype == F16
    assert torch.equal(after.dequantize(), before.dequantize())
    assert torch.equal(fit_scales(after, F32, round_scales=False).scale, before.scale)


def test_inexact_scales_are_counted_and_refused() -> None:
    before = weight(torch.tensor([0.1, 0.5, 0.3]))
    with pytest.raises(RecipeError) as caught:
        fit_scales(before, F16, round_scales=False)
    assert str(caught.value) == (
        "2 of 3 scales are not exact in float16 (the largest changes by 0.00024 of its value); add"
        " --round-scales to round them, or take a format that keeps their dtype, such as"
        " compressed-tensors"
    )
    after = fit_scales(before, F16, round_scales=True)
    assert torch.equal(after.scale, before.scale.half())
    assert after.codes is before.codes


@pytest.mark.parametrize("value", [1e-9, 70000.0])
def test_lost_scales_are_refused_in_any_case(value: float) -> None:
    before = weight(torch.tensor([1.0, value]))
    for rounding in (True, False):
        with pytest.raises(RecipeError, match="1 of 2 scales are too large or too small for fl"):
            fit_scales(before, F16, round_scales=rounding)


def test_static_input_scales_follow_and_nvfp4_keeps_its_own() -> None:
    codes = torch.ones(2, 16).to(torch.float8_e4m3fn)
    fp8 = QuantizedTensor(
        codes,
        torch.ones(1, 1, dtype=BF16),
        None,
        None,
        PRESETS["FP8"],
        input_scale=torch.tensor([0.5], dtype=BF16),
    )
    after = fit_scales(fp8, F32, round_scales=False)
    assert after.input_scale is not None
    assert (after.scale.dtype, after.input_scale.dtype) == (F32, F32)
    scale = torch.ones(2, 1).to(torch.float8_e4m3fn)
    fp4 = QuantizedTensor(codes, scale, None, None, PRESETS["NVFP4A16"], torch.ones(1))
    assert fit_scales(fp4, F16, round_scales=False).scale is scale


def test_zero_and_equal_dtypes_change_nothing() -> None:
    assert change(torch.zeros(3), F16).changed == 0
    assert change(torch.full((2, 2), 0.1), F32) == (0, 4, 0.0, 0)
