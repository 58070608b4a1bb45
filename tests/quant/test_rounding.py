"""Rounding to nearest: what must hold for every weight and every scheme."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.quant.rounding import (
    CANDIDATES,
    choose_scales,
    clip_ratios,
    encode,
    may_be_negative,
    round_to_nearest,
)
from compress.quant.scheme import ActivationScheme, QuantScheme

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def schemes(draw: st.DrawFn) -> QuantScheme:
    granularity = draw(st.sampled_from(["tensor", "channel", "group"]))
    size = draw(st.sampled_from([1, 2, 4, 8])) if granularity == "group" else 0
    return QuantScheme(draw(st.integers(2, 8)), draw(st.booleans()), granularity, size)


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """[N, K] of the sizes weights have, with zeros, equal values and outliers."""
    rows, seed = draw(st.integers(1, 4)), draw(st.integers(0, 2**16))
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, 8, generator=g) * 10.0 ** draw(st.integers(-3, 2))
    kind = draw(st.sampled_from(["normal", "zeros", "row of zeros", "constant", "outlier"]))
    if kind == "zeros":
        w.zero_()
    elif kind == "row of zeros":
        w[0] = 0
    elif kind == "constant":
        w[:] = w[0, 0]
    elif kind == "outlier":
        w[0, 0] *= 1000
    return w


searches = st.sampled_from(["minmax", "mse"])
scale_dtypes = st.sampled_from(DTYPES)
quick = settings(max_examples=40, deadline=None)


@quick
@given(weights(), schemes(), searches, scale_dtypes)
def test_codes_are_the_nearest_for_their_scale(w, scheme, search, dtype) -> None:
    q = round_to_nearest(w, scheme, clip_ratios(search, scheme), scale_dtype=dtype)
    assert q.scale.dtype == dtype
    positive = search == "minmax" or not may_be_negative(scheme)
    assert (q.scale > 0).all() if positive else (q.scale != 0).all()
    assert q.codes.dtype == torch.int8
    assert int(q.codes.min()) >= scheme.code_min
    assert int(q.codes.max()) <= scheme.code_max
    groups = q.column_groups()
    scale = q.scale.float()[:, groups].expand_as(w)
    zero = torch.zeros_like(scale) if q.zero is None else q.zero.float()[:, groups].expand_as(w)
    ends = (scheme.code_min - zero) * scale, (scheme.code_max - zero) * scale
    clipped = w.clamp(torch.minimum(*ends), torch.maximum(*ends))
    lost = (clipped - q.dequantize()).abs()
    assert (lost <= scale.abs() * 0.5001 + 1e-12).all()


@quick
@given(weights(), schemes(), searches, scale_dtypes)
def test_rounding_again_changes_nothing(w, scheme, search, dtype) -> None:
    q = round_to_nearest(w, scheme, clip_ratios(search, scheme), scale_dtype=dtype)
    again = encode(q.dequantize(), scheme, q.scale, q.zero)
    assert torch.equal(again.codes, q.codes)


@quick
@given(weights(), schemes(), searches)
def test_zero_stays_zero(w, scheme, search) -> None:
    w[:, ::3] = 0
    ratios = clip_ratios(search, scheme)
    q = round_to_nearest(w, scheme, ratios, scale_dtype=torch.float32)
    assert (q.dequantize()[:, ::3] == 0).all()


@quick
@given(weights(), schemes(), st.integers(-8, 8))
def test_powers_of_two_go_through(w, scheme, power) -> None:
    ratios = clip_ratios("mse", scheme)
    one = round_to_nearest(w, scheme, ratios, scale_dtype=torch.float32)
    two = round_to_nearest(w * 2.0**power, scheme, ratios, scale_dtype=torch.float32)
    assert torch.equal(one.codes, two.codes)


@quick
@given(weights(), schemes())
def test_rows_do_not_depend_on_each_other(w, scheme) -> None:
    if scheme.granularity == "tensor":
        return
    ratios = clip_ratios("mse", scheme)
    whole = round_to_nearest(w, scheme, ratios, scale_dtype=torch.bfloat16)
    for i in range(len(w)):
        row = round_to_nearest(w[i : i + 1], scheme, ratios, scale_dtype=torch.bfloat16)
        assert torch.equal(row.codes[0], whole.codes[i])
        assert torch.equal(row.scale[0], whole.scale[i])


@pytest.mark.parametrize(
    ("scheme", "shape"),
    [
        (QuantScheme(4, True, "tensor", 0), (1, 1)),
        (QuantScheme(4, False, "channel", 0), (6, 1)),
        (QuantScheme(4, False, "group", 4), (6, 3)),
        (QuantScheme(4, True, "group", 8), (6, 2)),  # the last group is short
    ],
)
def test_a_scale_for_every_group(scheme: QuantScheme, shape: tuple[int, int]) -> None:
    scale, zero = choose_scales(torch.randn(6, 12), scheme, torch.ones(1), torch.float16)
    assert scale.shape == shape
    assert (zero is None) == scheme.symmetric
    assert zero is None or (zero.shape == shape and zero.dtype == torch.int8)


def test_one_scale_a_tensor_sees_importance_by_column() -> None:
    w = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    w[:, 0] *= 20  # an outlier column that nothing drives may be clipped
    scheme = QuantScheme(4, True, "tensor", 0)
    ratios = clip_ratios("importance", scheme)
    even, _ = choose_scales(w, scheme, ratios, torch.float32)
    driven = torch.ones(8)
    driven[0] = 1e-6
    finer, _ = choose_scales(w, scheme, ratios, torch.float32, driven)
    assert abs(float(finer)) < abs(float(even))


def test_ranges_go_from_the_full_one_to_a_clipped_one() -> None:
    assert clip_ratios("minmax", QuantScheme(4)).tolist() == [1.0]
    for bits, symmetric in product(range(2, 9), (True, False)):
        scheme = QuantScheme(bits, symmetric)
        ratios = clip_ratios("mse", scheme, "both")
        assert len(ratios) == CANDIDATES
        assert torch.equal(clip_ratios("mse", scheme), ratios)
        if may_be_negative(scheme):
            ratios, turned = ratios.chunk(2)
            assert torch.equal(turned, -ratios)
        assert torch.equal(clip_ratios("mse", scheme, "positive"), ratios)
        assert (ratios.diff() < 0).all()
        assert (ratios > 0).all()
        # The widest range reaches amax with its last positive code.
        amax_in_steps = (2**bits - 1) / 2 / float(ratios[0])
        assert amax_in_steps == pytest.approx(2 ** (bits - 1) - 1)


@settings(quick, max_examples=40)
@given(weights(), schemes(), st.booleans(), scale_dtypes)
def test_positive_scales_are_the_best_of_those_above_zero(w, scheme, weigh, dtype) -> None:
    """By brute force over the candidates, and never better than the best of both signs."""
    importance = torch.linspace(0.1, 2.0, w.shape[1]) if weigh else None
    mass = torch.ones(w.shape[1]) if importance is None else importance

    def costs(ratios: Tensor) -> tuple[Tensor, Tensor]:
        """Of every scale, fp64 [N, G], and the scales."""
        scale, zero = choose_scales(w, scheme, ratios, dtype, importance)
        q = encode(w, scheme, scale, zero)
        lost = (q.dequantize().double() - w).square() * mass
        if scheme.granularity == "tensor":
            return lost.sum().reshape(1, 1), scale
        return lost.unflatten(1, (scale.shape[1], -1)).sum(2), scale

    ratios = clip_ratios("mse", scheme, "positive")
    found, scale = costs(ratios)
    assert (scale > 0).all()
    best = torch.stack([costs(ratio.reshape(1))[0] for ratio in ratios]).amin(0)
    torch.testing.assert_close(found, best, rtol=1e-4, atol=1e-12)
    both, _ = costs(clip_ratios("mse", scheme, "both"))
    assert (found >= both * (1 - 1e-4) - 1e-12).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-38, 1e-7, 6e4])
def test_extreme_sizes_stay_finite(dtype: torch.dtype, size: float) -> None:
    w = (torch.randn(4, 16).clamp(-1, 1) * size).to(dtype).float()
    for symmetric in (True, False):
        scheme = QuantScheme(4, symmetric, "channel", 0)
        q = round_to_nearest(w, scheme, clip_ratios("mse", scheme), scale_dtype=dtype)
        assert torch.isfinite(q.dequantize()).all()
        assert torch.isfinite(q.scale).all()
        assert (q.scale != 0).all()


def test_scales_are_negative_where_the_grid_may_be_turned_and_only_there() -> None:
    w = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    for scheme, negative in [
        (QuantScheme(4, True, "group", 16), True),
        (QuantScheme(3, True, "channel", 0), True),
        (QuantScheme(4, False, "group", 16), False),
        (QuantScheme(8, True, "channel", 0), False),
        (QuantScheme(4, True, "group", 16, ActivationScheme()), False),
    ]:
        q = round_to_nearest(w, scheme, clip_ratios("mse", scheme), scale_dtype=torch.bfloat16)
        assert bool((q.scale < 0).any()) == negative, scheme.describe()


@pytest.mark.parametrize(("bits", "gain"), [(3, 0.9), (4, 0.94)])
def test_turned_grids_lose_less_with_as_many_candidates(bits: int, gain: float) -> None:
    w = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    lost = []
    for activation in (None, ActivationScheme()):  # one that keeps scales positive
        scheme = QuantScheme(bits, True, "group", 64, activation)
        q = round_to_nearest(w, scheme, clip_ratios("mse", scheme), scale_dtype=torch.bfloat16)
        lost.append(float((q.dequantize() - w).square().sum()))
    assert lost[0] < gain * lost[1]
