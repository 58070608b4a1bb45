"""LLM.int8() against the paper, column by column, and against bitsandbytes' arithmetic."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.methods import METHODS
from compress.methods.llm_int8 import LlmInt8Config, outlier_columns, quantize, round_rows
from compress.methods.observed import Observed
from compress.methods.outcome import relative_error
from compress.quant.activations import fake_quantize
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme

DYNAMIC, CALIBRATED = PRESETS["LLM_INT8"], PRESETS["LLM_INT8_CALIBRATED"]
CONFIG = LlmInt8Config()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_outliers(tokens: int, k: int, columns: list[int], seed: int = 0) -> Tensor:
    x = numbers(tokens, k, seed=seed).clamp(-4, 4)
    x[:, columns] *= 40
    x[0, columns] = 50.0
    return x


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 9),
    k=st.integers(1, 40),
    exponent=st.floats(-30, 30),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 10_000),
)
def test_the_stored_absmax_reads_back_as_the_scale(
    n: int, k: int, exponent: float, dtype: torch.dtype, seed: int
) -> None:
    weight = (numbers(n, k, seed=seed) * 10.0**exponent).to(dtype).float()
    codes, scale = round_rows(weight)
    stored = scale * 127
    assert torch.equal(stored / 127, scale)
    torch.testing.assert_close(stored, weight.abs().amax(1, keepdim=True), rtol=2e-7, atol=0)
    assert codes.abs().amax() == 127


def test_scales_of_every_mantissa_read_back() -> None:
    mantissas = torch.arange(1 << 23, 1 << 24, 7).float()  # rows of one weight each
    _, scale = round_rows(mantissas[:, None])
    assert torch.equal((scale * 127) / 127, scale)


@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-38, 1e-36])
def test_rows_of_nothing_have_codes_of_nothing(tiny: float) -> None:
    codes, scale = round_rows(torch.tensor([[tiny, -tiny, 0.0], [1.0, -2.0, 0.5]]))
    assert codes[0].tolist() == [0, 0, 0]
    assert codes[1].tolist() == [64, -127, 32]
    assert torch.equal((scale * 127) / 127, scale)


def test_codes_are_bitsandbytes() -> None:
    weight = numbers(33, 70).to(torch.float16)
    absmax = weight.abs().amax(1).float()  # as its CPU kernel has it
    theirs = torch.round(weight * (127.0 / absmax.unsqueeze(-1))).to(torch.int8)
    assert torch.equal(round_rows(weight.float())[0], theirs)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.lists(st.floats(-8, 8), min_size=5, max_size=5), min_size=1, max_size=4))
def test_no_code_is_nearer(rows: list[list[float]]) -> None:
    weight = torch.tensor(rows).float()
    weight[weight.abs() < 1e-3] = 0
    codes, scale = round_rows(weight)
    grid = torch.arange(-127, 128)[:, None, None] * scale.double()  # grid: [255, N, 1]
    best = (weight.double() - grid).abs().amin(0)
    found = (weight.double() - codes.double() * scale.double()).abs()
    assert bool((found <= best + 1e-6 * scale.double()).all())


def test_calibrated_columns_keep_their_weights() -> None:
    weights = [numbers(12, 16).bfloat16(), numbers(5, 16, seed=1).bfloat16()]
    absmax = torch.full((16,), 1.0)
    absmax[[3, 11]], absmax[7] = 6.0, 5.99
    for weight, outcome in zip(
        weights,
        quantize(
            weights,
            CALIBRATED,
            CONFIG,
            scale_dtype=torch.bfloat16,
            observed=Observed(absmax=absmax),
        ),
        strict=True,
    ):
        q = outcome.quantized
        assert q.outliers is not None
        assert q.outliers.columns.tolist() == [3, 11]
        assert torch.equal(q.outliers.weight, weight[:, [3, 11]])
        assert torch.equal(q.dequantize()[:, [3, 11]], weight[:, [3, 11]].float())
        # The codes are those of the dynamic form, outlier columns included.
        (plain,) = quantize([weight], DYNAMIC, CONFIG, scale_dtype=torch.bfloat16)
        assert torch.equal(q.codes, plain.quantized.codes)
        assert torch.equal(q.scale, plain.quantized.scale)
        assert plain.quantized.outliers is None
        assert (outcome.outlier_columns, plain.outlier_columns) == (2, None)


def test_the_error_counts_what_outlier_columns_save() -> None:
    weight, x = numbers(24, 32), with_outliers(200, 32, [5, 20])
    weight[:, [5, 20]] /= 100  # small beside the row's largest: int8 keeps little of them
    hessian, absmax = x.T @ x / 200, x.abs().amax(0)
    (fixed,) = quantize(
        [weight],
        CALIBRATED,
        CONFIG,
        scale_dtype=torch.float32,
        observed=Observed(hessian=hessian, absmax=absmax),
    )
    (found,) = quantize(
        [weight], DYNAMIC, CONFIG, scale_dtype=torch.float32, observed=Observed(hessian=hessian)
    )
    assert fixed.error == relative_error(weight, fixed.quantized.dequantize(), hessian)
    assert found.error == relative_error(weight, found.quantized.dequantize(), hessian)
    assert fixed.error < found.error / 50


@settings(max_examples=40, deadline=None)
@given(
    columns=st.sets(st.integers(0, 11), max_size=4),
    tokens=st.integers(1, 6),
    seed=st.integers(0, 1000),
    calibrated=st.booleans(),
)
def test_the_layer_is_the_papers_sum_over_columns(
    columns: set[int], tokens: int, seed: int, calibrated: bool
) -> None:
    """Eq. 8, written out: 16-bit products for outlier columns, integers for all others."""
    some = sorted(columns)
    x, weight = with_outliers(tokens, 12, some, seed), numbers(7, 12, seed=seed + 1)
    scheme = CALIBRATED if calibrated else DYNAMIC
    (outcome,) = quantize(
        [weight],
        scheme,
        CONFIG,
        scale_dtype=torch.float32,
        observed=Observed(absmax=x.abs().amax(0)),
    )
    q, inputs = outcome.quantized, outcome.quantized.inputs()
    assert inputs is not None
    got = fake_quantize(x, inputs).double() @ q.dequantize().double().T

    seen = x if calibrated else x.half().float()  # bitsandbytes looks at fp16
    outliers = [c for c in range(12) if float(x[:, c].abs().max()) >= 6.0]
    assert outliers == some
    expected = torch.zeros(tokens, 7, dtype=torch.float64)
    for t, token in enumerate(seen.tolist()):
        # Its scale of a token covers all that is no outlier, also what is in an outlier's column.
        left_out = [c in outliers if calibrated else abs(v) >= 6.0 for c, v in enumerate(token)]
        inside = [abs(v) for v, out in zip(token, left_out, strict=True) if not out]
        largest = max(inside, default=0.0) or 1.0
        for n, row in enumerate(weight.tolist()):
            absmax = max(abs(w) for w in row)
            for c in range(12):
                code = round(row[c] * 127 / absmax)
                if c in outliers:
                    kept = row[c] if calibrated else code * absmax / 127
                    expected[t, n] += float(x[t, c]) * kept
                else:
                    steps = round(token[c] * 127 / largest) * code
                    expected[t, n] += steps * (largest / 127) * (absmax / 127)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


def test_no_outlier_column_is_no_column() -> None:
    weight = numbers(4, 6)
    (outcome,) = quantize(
        [weight],
        CALIBRATED,
        CONFIG,
        scale_dtype=torch.float32,
        observed=Observed(absmax=torch.ones(6)),
    )
    assert outcome.quantized.outliers is not None
    assert outcome.quantized.outliers.weight.shape == (4, 0)
    assert outcome.outlier_columns == 0


def test_the_threshold_is_the_schemes() -> None:
    absmax = torch.tensor([1.0, 10.0, 20.0, 20.5])
    assert outlier_columns(absmax, 20.0).tolist() == [2, 3]


def test_an_expert_that_no_token_reached_says_so() -> None:
    (outcome,) = quantize(
        [numbers(4, 6)],
        CALIBRATED,
        CONFIG,
        scale_dtype=torch.float32,
        observed=Observed(hessian=torch.zeros(6, 6), absmax=torch.zeros(6), expert_tokens=0),
    )
    assert outcome.kept is not None
    assert "no token reached the expert" in outcome.kept
    assert outcome.error > 0  # of the weights alone, not 0 under inputs that never came


@pytest.mark.parametrize(
    "scheme",
    [
        PRESETS["W8A8"],
        PRESETS["W4A16"],
        PRESETS["FP8_DYNAMIC"],
        replace(DYNAMIC, bits=4),
        replace(DYNAMIC, granularity="tensor"),
        replace(DYNAMIC, symmetric=False),
        replace(DYNAMIC, activation=ActivationScheme(bits=4, outliers="dynamic")),
    ],
    ids=lambda s: s.describe(),
)
def test_other_schemes_are_refused(scheme: QuantScheme) -> None:
    reason = METHODS["llm_int8"].why_not(scheme)
    assert reason is not None
    assert "LLM_INT8" in reason
    assert METHODS["llm_int8"].why_not(DYNAMIC) is None


def test_only_calibrated_columns_need_data() -> None:
    row = METHODS["llm_int8"]
    assert not row.needs_calibration(CONFIG, DYNAMIC)
    assert row.needs_calibration(CONFIG, CALIBRATED)
