"""Small floats against lists of all their values; scales against a search by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.quant.floats import (
    E2M1_MAX,
    E4M3_MAX,
    RUN,
    global_scale,
    nearest_e2m1,
    nearest_e4m3,
    quantize_fp4,
    quantize_fp8,
)
from compress.quant.scheme import PRESETS, QuantScheme
from compress.quant.tensor import QuantizedTensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (sign, exponent, mantissa) written out, in the order of their bit patterns.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [m / 8 * 2.0**-6 for m in range(8)]
E4M3 += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
NVFP4 = PRESETS["NVFP4A16"]
OFFSETS = (0, -1, 1, -2, 2, -3, 3, -4, 4, 5, 6, 7)
quick = settings(max_examples=40, deadline=None)


def oracle(x: Tensor, values: list[float]) -> Tensor:
    """Nearest of ± values to every x by looking at all of them; ties to the even bit pattern."""
    grid = torch.tensor(values, dtype=torch.float64)
    size = x.double().abs().clamp(max=values[-1])
    distance = (size[..., None] - grid).abs()
    least = distance.amin(-1, keepdim=True)
    odd = torch.arange(len(values)) % 2
    # A tie is between neighbours, of which one is even.
    index = torch.where(distance == least, odd, 2).argmin(-1)
    return torch.where(x < 0, -grid[index], grid[index]).float()


def midpoints(values: list[float]) -> Tensor:
    grid = torch.tensor(values, dtype=torch.float64)
    return ((grid[1:] + grid[:-1]) / 2).float()


@pytest.mark.parametrize(("nearest", "values"), [(nearest_e4m3, E4M3), (nearest_e2m1, E2M1)])
def test_every_value_tie_and_neighbour(nearest, values: list[float]) -> None:
    points = torch.cat([torch.tensor(values), midpoints(values), torch.tensor([1e-45, 1e30])])
    up = torch.nextafter(points, torch.tensor(torch.inf))
    down = torch.nextafter(points, torch.tensor(-torch.inf))
    x = torch.cat([points, up, down])
    x = torch.cat([x, -x])
    assert torch.equal(nearest(x), oracle(x, values))
    exact = torch.tensor(values)
    assert torch.equal(nearest(exact), exact)


@quick
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=32))
def test_any_number_goes_to_the_nearest(numbers: list[float]) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    assert torch.equal(nearest_e4m3(x), oracle(x, E4M3))
    assert torch.equal(nearest_e2m1(x), oracle(x, E2M1))


@quick
@given(st.integers(0, 2**16), st.integers(-12, 12))
def test_numbers_of_the_size_of_the_grid_go_to_the_nearest(seed: int, power: int) -> None:
    x = torch.randn(256, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    assert torch.equal(nearest_e4m3(x), oracle(x, E4M3))
    assert torch.equal(nearest_e4m3(x), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert torch.equal(nearest_e2m1(x), oracle(x, E2M1))


def test_what_lies_beyond_saturates() -> None:
    x = torch.tensor([449.0, -464.0, 1e38, torch.inf, -torch.inf])
    assert nearest_e4m3(x).tolist() == [448, -448, 448, 448, -448]
    assert nearest_e2m1(x).tolist() == [6, -6, 6, 6, -6]
    assert nearest_e4m3(torch.tensor([torch.nan])).isnan().all()


def test_an_input_is_left_as_it_is() -> None:
    x = torch.tensor([0.3, 500.0])
    nearest_e4m3(x)
    nearest_e2m1(x)
    assert x.tolist() == torch.tensor([0.3, 500.0]).tolist()


def cells(shape: tuple[int, int], scheme: QuantScheme) -> list[tuple[slice, slice]]:
    """The rows and columns of every scale, row of scales by row of scales."""
    n, k = shape
    height, width = scheme.rows_per_scale(n), scheme.columns_per_scale(k)
    rows = [slice(i, min(i + height, n)) for i in range(0, n, height)]
    columns = [slice(i, min(i + width, k)) for i in range(0, k, width)]
    return [(r, c) for r in rows for c in columns]


def by_hand(
    w: Tensor, scheme: QuantScheme, ratios: list[float], dtype: torch.dtype, weigh: Tensor
) -> tuple[Tensor, Tensor]:
    """Scales and dequantized weights, cell by cell."""
    scales, out = [], torch.empty_like(w)
    for r, c in cells((w.shape[0], w.shape[1]), scheme):
        cell, best, found = w[r, c], None, None
        for ratio in ratios:
            scale = (cell.abs().max() / E4M3_MAX * ratio).to(dtype)
            scale = torch.ones((), dtype=dtype) if cell.abs().max() == 0 else scale
            q = oracle(cell / scale.float(), E4M3) * scale.float()
            loss = float(((cell - q).square() * weigh[c]).sum())
            if best is None or loss < best * (1 - 1e-6):
                best, found = loss, (scale, q)
        assert found is not None
        scales.append(found[0])
        out[r, c] = found[1]
    return torch.stack(scales).reshape(scheme.scale_shape(w.shape[0], w.shape[1])), out


@st.composite
def fp8_schemes(draw: st.DrawFn) -> QuantScheme:
    granularity = draw(st.sampled_from(["tensor", "channel", "group", "block"]))
    size = draw(st.sampled_from([2, 4, 8])) if granularity in ("group", "block") else 0
    return QuantScheme(8, True, granularity, size, type="float")


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """[N, K] with zeros, outliers and sizes at both ends; edges that fill no cell."""
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 18))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    w = torch.randn(rows, columns, generator=g) * 10.0 ** draw(st.integers(-3, 2))
    if draw(st.booleans()):
        w[0] = 0
    if draw(st.booleans()):
        w[-1, -1] *= 1000
    return w


@quick
@given(weights(), fp8_schemes(), st.sampled_from(DTYPES), st.booleans())
def test_fp8_is_the_search_by_hand(w, scheme, dtype, search) -> None:
    ratios = [1 + i / 4 for i in range(4)] if search else [1.0]
    weigh = torch.linspace(0.5, 4, w.shape[1])
    q = quantize_fp8(w, scheme, ratios, scale_dtype=dtype, importance=weigh)
    scale, dense = by_hand(w, scheme, ratios, dtype, weigh)
    assert q.scale.dtype == dtype
    assert q.scale.shape == scale.shape
    assert q.codes.dtype == torch.float8_e4m3fn
    if not search:
        assert torch.equal(q.scale, scale)
        assert torch.equal(q.dequantize(), dense)
        return
    # Two candidates may cost the same up to rounding.
    for r, c in cells((w.shape[0], w.shape[1]), scheme):
        ours, theirs = ((w - x)[r, c].square() * weigh[c] for x in (q.dequantize(), dense))
        torch.testing.assert_close(ours.sum(), theirs.sum(), rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("preset", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK"])
def test_several_runs_are_one(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = PRESETS[preset]
    w = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    assert w.numel() < RUN
    options = {"scale_dtype": torch.bfloat16, "importance": torch.rand(200)}
    once = quantize_fp8(w, scheme, [1.0, 1.3, 1.6], **options)
    monkeypatch.setattr("compress.quant.floats.RUN", 1000)
    again = quantize_fp8(w, scheme, [1.0, 1.3, 1.6], **options)
    assert torch.equal(once.scale, again.scale)
    assert torch.equal(once.codes.float(), again.codes.float())


def test_blocks_at_the_edges_have_scales_of_their_own() -> None:
    w = torch.ones(130, 257)
    w[128:] = 2
    w[:, 256:] *= 4
    q = quantize_fp8(w, PRESETS["FP8_BLOCK"], [1.0], scale_dtype=torch.float32)
    assert q.scale.shape == (2, 3)
    torch.testing.assert_close(q.scale * 448, torch.tensor([[1.0, 1, 4], [2, 2, 8]]))
    torch.testing.assert_close(q.dequantize(), w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-7, 6e4])
def test_extreme_sizes_stay_finite(dtype: torch.dtype, size: float) -> None:
    w = (torch.randn(4, 32).clamp(-1, 1) * size).to(dtype).float()
    for preset in ("FP8", "FP8_DYNAMIC", "FP8_BLOCK"):
        q = quantize_fp8(w, PRESETS[preset], [1.0, 1.5], scale_dtype=dtype)
        check_finite(q)
    check_finite(quantize_fp4(w, NVFP4, OFFSETS, global_scale([w])))


def check_finite(q: QuantizedTensor) -> None:
    assert torch.isfinite(q.scale.float()).all()
    assert (q.scale.float() > 0).all()
    assert torch.isfinite(q.dequantize()).all()


def test_a_scale_that_was_rounded_down_saturates_the_largest_weight() -> None:
    w = torch.tensor([[448.8, 1.0]])  # 448.8 / 448 is 1 in bf16
    q = quantize_fp8(w, PRESETS["FP8_DYNAMIC"], [1.0], scale_dtype=torch.bfloat16)
    assert float(w[0, 0] / q.scale.float()) > 448
    assert float(q.codes.float()[0, 0]) == 448


def test_the_least_scale_stands_in_for_one_that_underflows() -> None:
    w = torch.full((1, 4), 1e-6)
    q = quantize_fp8(w, PRESETS["FP8_DYNAMIC"], [1.0], scale_dtype=torch.float16)
    torch.testing.assert_close(q.dequantize(), w, rtol=0.07, atol=0)


def test_no_data_at_all_and_zeros() -> None:
    q = quantize_fp8(torch.zeros(3, 5), PRESETS["FP8_DYNAMIC"], [1.0], scale_dtype=torch.float32)
    assert (q.scale == 1).all()
    assert global_scale([torch.zeros(2, 16)]).tolist() == [1.0]
    assert global_scale([torch.full((2, 16), 1e-37)]).tolist() == [1.0]  # 448 * 6 / that is inf
    q = quantize_fp4(torch.zeros(2, 16), NVFP4, [0], torch.ones(1))
    assert (q.dequantize() == 0).all()


def nvfp4_by_hand(w: Tensor, divisor: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """Least squared error of every group over the E4M3 scales around the plain one: [N, G]."""
    steps = torch.tensor(E4M3)
    losses = []
    for group in w.reshape(w.shape[0], -1, 16).unbind(1):
        plain = oracle(group.abs().amax(1) / 6 * divisor, E4M3)
        index = (plain[:, None] == steps).int().argmax(1)
        found = []
        for i in offsets:
            s = steps[(index + i).clamp(1, len(E4M3) - 1)][:, None] / divisor
            found.append((group - oracle(group / s, E2M1) * s).square().sum(1))
        losses.append(torch.stack(found).amin(0))
    return torch.stack(losses, dim=1)


@quick
@given(st.integers(0, 2**16), st.integers(-4, 2))
def test_nvfp4_takes_the_best_scale_of_its_candidates(seed: int, power: int) -> None:
    w = torch.randn(5, 48, generator=torch.Generator().manual_seed(seed)) * 10.0**power
    w[0, 0] *= 300  # other groups then have subnormal scales
    divisor = global_scale([w])
    q = quantize_fp4(w, NVFP4, OFFSETS, divisor)
    assert q.scale.dtype == torch.float8_e4m3fn
    assert q.scale.shape == (5, 3)
    assert set(q.codes.float().abs().unique().tolist()) <= set(E2M1)
    lost = (w - q.dequantize()).square().reshape(5, 3, 16).sum(-1)
    torch.testing.assert_close(lost, nvfp4_by_hand(w, divisor, OFFSETS), rtol=1e-4, atol=1e-30)


def test_one_divisor_spans_several_weights() -> None:
    a, b = torch.full((2, 16), 0.5), torch.full((3, 16), -2.0)
    divisor = global_scale([a, b])
    assert divisor.tolist() == [E4M3_MAX * E2M1_MAX / 2]
    assert float(quantize_fp4(b, NVFP4, [0], divisor).scale.float().max()) == 448
    assert float(quantize_fp4(a, NVFP4, [0], divisor).scale.float().max()) == 112


@pytest.mark.interop
def test_equals_compressed_tensors() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    w = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    groups = w.reshape(6, 4, 16)
    theirs = generate_gparam(w.min(), w.max())
    divisor = global_scale([w])
    assert torch.equal(divisor, theirs)
    args = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    )
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args, theirs)
    q = quantize_fp4(w, NVFP4, [0], divisor)
    assert torch.equal(q.scale.float(), scale)
    assert torch.equal(q.dequantize(), fake_quantize(w, scale, zero, args, theirs))
    args = QuantizationArgs(num_bits=8, type="float", strategy="channel")
    scale, zero = calculate_qparams(w.amin(1, True), w.amax(1, True), args)
    f = quantize_fp8(w, PRESETS["FP8_DYNAMIC"], [1.0], scale_dtype=torch.float32)
    assert torch.equal(f.scale, scale)
    assert torch.equal(f.dequantize(), fake_quantize(w, scale, zero, args))
