"""Plain rounding: the search takes the best of its candidates, the error is what it says."""

import pytest
import torch
from torch import Tensor

from compress.methods import METHODS, rtn
from compress.methods.observed import Observed
from compress.methods.outcome import relative_error
from compress.methods.rtn import UNSEEN, RtnConfig, column_importance
from compress.quant.rounding import clip_ratios
from compress.quant.scheme import PRESETS, QuantScheme


def random_hessian(k: int, seed: int = 0) -> Tensor:
    x = torch.randn(4 * k, k, generator=torch.Generator().manual_seed(seed))
    x *= torch.linspace(0.1, 4, k)
    return x.T @ x / (4 * k)


def by_hand(w: Tensor, ratios: Tensor, importance: Tensor, scheme: QuantScheme) -> Tensor:
    """Least weighted squared error of each row over the candidates, in float64: [N]."""
    w = w.double()
    steps = scheme.code_max - scheme.code_min
    losses = []
    for ratio in ratios.double():
        if scheme.symmetric:
            scale, zero = w.abs().amax(1) / (steps / 2) * ratio, torch.zeros(len(w))
        else:
            low, high = w.amin(1).clamp(max=0) * ratio, w.amax(1).clamp(min=0) * ratio
            scale = (high - low) / steps
            zero = (scheme.code_min - low / scale.float()).round()
            zero = zero.clamp(scheme.code_min, scheme.code_max)
        scale = scale.float()[:, None]
        codes = ((w / scale).round() + zero[:, None]).clamp(scheme.code_min, scheme.code_max)
        losses.append(((w - (codes - zero[:, None]) * scale).square() * importance).sum(1))
    return torch.stack(losses).min(0).values


@pytest.mark.parametrize("search", ["minmax", "mse", "importance"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_search_finds_the_best_of_its_candidates(
    search: str, symmetric: bool, bits: int
) -> None:
    scheme = QuantScheme(bits, symmetric, "channel", 0)
    w, hessian = (
        torch.randn(16, 32, generator=torch.Generator().manual_seed(bits)),
        random_hessian(32),
    )
    config = RtnConfig(search)
    (outcome,) = rtn.quantize(
        [w], scheme, config, scale_dtype=torch.float32, observed=Observed(hessian=hessian)
    )
    weights = column_importance(hessian) if search == "importance" else torch.ones(32)
    lost = ((w - outcome.quantized.dequantize()).square() * weights).sum(1)
    best = by_hand(w, clip_ratios(search, scheme), weights, scheme)
    torch.testing.assert_close(lost.double(), best.double(), rtol=1e-4, atol=1e-12)


def test_importance_pays_where_columns_differ() -> None:
    w, hessian = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)), random_hessian(64)
    scheme = QuantScheme(3, True, "group", 16)
    errors = []
    for search in ("minmax", "mse", "importance"):
        (outcome,) = rtn.quantize(
            [w],
            scheme,
            RtnConfig(search),
            scale_dtype=torch.bfloat16,
            observed=Observed(hessian=hessian),
        )
        errors.append(outcome.error)
    assert errors[2] < errors[1] < errors[0]


def test_importance_is_cut_along_the_groups() -> None:
    """One group's scale depends on its own columns and their importance alone."""
    w, hessian = torch.randn(4, 32, generator=torch.Generator().manual_seed(2)), random_hessian(32)
    whole = QuantScheme(4, True, "group", 8)
    config = RtnConfig("importance")
    (all_groups,) = rtn.quantize(
        [w], whole, config, scale_dtype=torch.float32, observed=Observed(hessian=hessian)
    )
    for g in range(4):
        part = slice(8 * g, 8 * g + 8)
        (one,) = rtn.quantize(
            [w[:, part]],
            QuantScheme(4, True, "channel", 0),
            config,
            scale_dtype=torch.float32,
            observed=Observed(hessian=hessian[part, part]),
        )
        assert torch.equal(one.quantized.scale[:, 0], all_groups.quantized.scale[:, g])
        assert torch.equal(one.quantized.codes, all_groups.quantized.codes[:, part])


def test_the_error_is_the_share_of_the_output_that_is_lost() -> None:
    g = torch.Generator().manual_seed(3)
    w, q = torch.randn(8, 16, generator=g), torch.randn(8, 16, generator=g)
    x = torch.randn(100, 16, generator=g)
    lost = (x @ (w - q).T).square().sum() / (x @ w.T).square().sum()
    assert relative_error(w, q, x.T @ x / 100) == pytest.approx(float(lost), rel=1e-5)
    plain = (w - q).square().sum() / w.square().sum()
    assert relative_error(w, q, None) == pytest.approx(float(plain), rel=1e-6)
    assert relative_error(w, w, x.T @ x) == 0
    assert relative_error(torch.zeros(2, 2), torch.zeros(2, 2), None) == 0
    assert relative_error(w, q, torch.zeros(16, 16)) == 0


def test_an_expert_no_token_reached_counts_its_columns_alike() -> None:
    w = torch.randn(4, 16, generator=torch.Generator().manual_seed(4))
    scheme, zeros = QuantScheme(4, True, "channel", 0), torch.zeros(16, 16)
    (unseen,) = rtn.quantize(
        [w],
        scheme,
        RtnConfig("importance"),
        scale_dtype=torch.float32,
        observed=Observed(hessian=zeros, expert_tokens=0),
    )
    (plain,) = rtn.quantize([w], scheme, RtnConfig("mse"), scale_dtype=torch.float32)
    assert torch.equal(unseen.quantized.codes, plain.quantized.codes)
    assert unseen.error == plain.error > 0
    assert unseen.kept == UNSEEN


def test_only_importance_needs_data() -> None:
    needs = METHODS["rtn"].needs_calibration
    scheme = PRESETS["W4A16"]
    searches = ("minmax", "mse", "importance")
    found = [needs(RtnConfig(s), scheme) for s in searches]
    assert found == [False, False, True]
    assert METHODS["gptq"].needs_calibration(METHODS["gptq"].config(), scheme)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", ["W8A8_STATIC", "FP8", "LLM_INT8_CALIBRATED"])
def test_what_a_scheme_fixes_beforehand_needs_data(method: str, preset: str) -> None:
    row = METHODS[method]
    assert row.needs_calibration(row.config(), PRESETS[preset])
