"""fp8 and nvfp4: what the search gains, what it may look at, what is refused."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.methods import METHODS, fp8, nvfp4
from compress.methods.fp8 import RATIOS, Fp8Config
from compress.methods.nvfp4 import OFFSETS, Nvfp4Config
from compress.methods.observed import Observed
from compress.methods.outcome import Outcome, relative_error
from compress.methods.rtn import UNSEEN, ScaleSearch
from compress.quant.floats import nearest_e4m3
from compress.quant.scheme import PRESETS, QuantScheme

FP8_SCHEMES = [PRESETS[name] for name in ("FP8", "FP8_DYNAMIC", "FP8_BLOCK")]
NVFP4 = PRESETS["NVFP4A16"]


def weight(seed: int = 0, rows: int = 96, columns: int = 160) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.1


def hessian(k: int = 160) -> Tensor:
    x = torch.randn(3 * k, k, generator=torch.Generator().manual_seed(1))
    x *= torch.logspace(-1, 1, k)[torch.randperm(k, generator=torch.Generator().manual_seed(2))]
    return x.T @ x / (3 * k)


def as_fp8(
    search: ScaleSearch, scheme: QuantScheme, h: Tensor | None, expert_tokens: int | None = None
) -> Outcome:
    (outcome,) = fp8.quantize(
        [weight()],
        scheme,
        Fp8Config(search),
        scale_dtype=torch.bfloat16,
        observed=Observed(h, expert_tokens=expert_tokens),
    )
    return outcome


def as_nvfp4(search: ScaleSearch, h: Tensor | None, expert_tokens: int | None = None) -> Outcome:
    (outcome,) = nvfp4.quantize(
        [weight()],
        NVFP4,
        Nvfp4Config(search),
        scale_dtype=torch.bfloat16,
        observed=Observed(h, expert_tokens=expert_tokens),
    )
    return outcome


@pytest.mark.parametrize("scheme", FP8_SCHEMES, ids=lambda s: s.granularity)
def test_a_search_loses_no_more_than_the_plain_scale(scheme: QuantScheme) -> None:
    plain, searched = (as_fp8(search, scheme, None).error for search in ("minmax", "mse"))
    assert searched < plain < 0.0009  # 3 bits of mantissa: about (2^-4)^2 / 6


def test_nvfp4_scales_searched_lose_a_quarter_less() -> None:
    plain, searched = (as_nvfp4(search, None).error for search in ("minmax", "mse"))
    assert searched < 0.78 * plain
    assert plain < 0.01


def diagonal_loss(outcome: Outcome, h: Tensor) -> float:
    lost = (weight() - outcome.quantized.dequantize()).square()
    return float((lost * h.diagonal()).sum())


def test_importance_weighs_columns_by_the_hessian() -> None:
    h = hessian()
    for scheme in FP8_SCHEMES:
        found = [as_fp8(search, scheme, h) for search in ("mse", "importance")]
        assert diagonal_loss(found[1], h) <= diagonal_loss(found[0], h)
    found = [as_nvfp4(search, h) for search in ("mse", "importance")]
    assert diagonal_loss(found[1], h) < 0.9 * diagonal_loss(found[0], h)


def test_the_error_is_the_one_all_methods_are_judged_by() -> None:
    h = hessian()
    for outcome in (as_fp8("mse", FP8_SCHEMES[1], h), as_nvfp4("mse", h)):
        assert outcome.error == relative_error(weight(), outcome.quantized.dequantize(), h)


def test_an_expert_no_token_reached_counts_its_columns_alike() -> None:
    zeros = torch.zeros(160, 160)
    for unseen, plain in (
        (
            as_fp8("importance", FP8_SCHEMES[1], zeros, expert_tokens=0),
            as_fp8("mse", FP8_SCHEMES[1], None),
        ),
        (as_nvfp4("importance", zeros, expert_tokens=0), as_nvfp4("mse", None)),
    ):
        assert unseen.kept == UNSEEN
        assert plain.kept is None
        assert unseen.error == plain.error > 0
        assert torch.equal(unseen.quantized.codes.float(), plain.quantized.codes.float())


def test_weights_together_share_nvfp4s_divisor_and_nothing_else() -> None:
    small, large = weight(0) * 0.01, weight(1)
    together = nvfp4.quantize([small, large], NVFP4, Nvfp4Config(), scale_dtype=torch.bfloat16)
    alone = nvfp4.quantize([large], NVFP4, Nvfp4Config(), scale_dtype=torch.bfloat16)
    divisors = [o.quantized.global_scale for o in together]
    assert torch.equal(divisors[0], divisors[1])
    assert torch.equal(divisors[1], alone[0].quantized.global_scale)
    assert torch.equal(together[1].quantized.codes.float(), alone[0].quantized.codes.float())
    assert together[0].error < 1.2 * together[1].error  # E4M3 scales still resolve the small one


@pytest.mark.parametrize("search", ["minmax", "mse", "importance"])
def test_weights_together_share_fp8s_scale_a_tensor(search: ScaleSearch) -> None:
    """As one matrix, which is what runtimes make of them; other scales are each layer's own."""
    small, large = weight(0) * 0.3, weight(1, rows=40)
    for scheme in FP8_SCHEMES:
        options = {"scale_dtype": torch.bfloat16, "observed": Observed(hessian())}
        together = fp8.quantize([small, large], scheme, Fp8Config(search), **options)
        one = scheme.granularity == "tensor"
        given = [[torch.cat([small, large])]] if one else [[small], [large]]
        found = [fp8.quantize(some, scheme, Fp8Config(search), **options)[0] for some in given]
        expected = torch.cat([outcome.quantized.dequantize() for outcome in found])
        parts = [outcome.quantized for outcome in together]
        assert [q.codes.shape for q in parts] == [small.shape, large.shape]
        assert torch.equal(torch.cat([q.dequantize() for q in parts]), expected)
        assert (parts[0].scale.unique().tolist() == parts[1].scale.unique().tolist()) == one
        for outcome, w in zip(together, (small, large), strict=True):
            assert outcome.error == relative_error(w, outcome.quantized.dequantize(), hessian())


def test_merging_layers_of_one_scale_rounds_nothing_again() -> None:
    """What vLLM does to a merged matrix with a scale a tensor: rounds it to the largest scale."""

    def merged(parts: list[Outcome]) -> bool:
        largest = max(float(outcome.quantized.scale) for outcome in parts)
        dense = [outcome.quantized.dequantize() for outcome in parts]
        again = [nearest_e4m3(w / largest) * largest for w in dense]
        return all(torch.equal(a, b) for a, b in zip(dense, again, strict=True))

    scheme, options = FP8_SCHEMES[0], {"scale_dtype": torch.bfloat16}
    layers = [weight(0) * 0.3, weight(1)]
    assert merged(fp8.quantize(layers, scheme, Fp8Config(), **options))
    assert not merged([fp8.quantize([w], scheme, Fp8Config(), **options)[0] for w in layers])


def test_stored_dtypes_make_no_difference_to_bf16_weights() -> None:
    stored = weight().bfloat16()
    for module, config, scheme in (
        (fp8, Fp8Config(), FP8_SCHEMES[0]),
        (nvfp4, Nvfp4Config(), NVFP4),
    ):
        a, b = (
            module.quantize([w], scheme, config, scale_dtype=torch.bfloat16)[0].quantized
            for w in (stored, stored.float())
        )
        assert torch.equal(a.dequantize(), b.dequantize())


def test_candidates_start_with_the_plain_scale() -> None:
    assert RATIOS[0] == 1
    assert OFFSETS[0] == 0
    assert sorted(OFFSETS) == list(range(-4, 8))


def test_nvfp4_refuses_widths_that_16_does_not_divide() -> None:
    with pytest.raises(RecipeError, match="groups of 16 columns, a layer has 40"):
        nvfp4.quantize([torch.ones(4, 40)], NVFP4, Nvfp4Config(), scale_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("method", "preset", "words"),
    [
        ("fp8", "W8A16", "method rtn or gptq"),
        ("fp8", "NVFP4A16", "method nvfp4"),
        ("nvfp4", "W4A16", "method rtn or gptq"),
        ("nvfp4", "FP8_DYNAMIC", "method fp8"),
        ("rtn", "FP8", "method fp8"),
        ("gptq", "NVFP4A16", "method nvfp4"),
    ],
)
def test_a_scheme_for_another_method_is_refused(method: str, preset: str, words: str) -> None:
    reason = METHODS[method].why_not(PRESETS[preset])
    assert reason is not None
    assert words in reason


def test_inputs_that_no_runtime_has_beside_floats_are_refused() -> None:
    int8 = PRESETS["W8A8"].activation
    mixed = METHODS["fp8"].why_not(replace(PRESETS["FP8_DYNAMIC"], activation=int8))
    assert mixed is not None
    assert "E4M3" in mixed
    four = METHODS["nvfp4"].why_not(replace(NVFP4, activation=int8))
    assert four is not None
    assert "16 bit" in four
    for preset in ("FP8", "FP8_DYNAMIC", "FP8_BLOCK"):
        assert METHODS["fp8"].why_not(PRESETS[preset]) is None
    assert METHODS["nvfp4"].why_not(NVFP4) is None


def test_what_needs_data() -> None:
    for method in ("fp8", "nvfp4"):
        row, scheme = METHODS[method], PRESETS["NVFP4A16" if method == "nvfp4" else "FP8_DYNAMIC"]
        found = [
            row.needs_calibration(row.config(search), scheme)
            for search in ("minmax", "mse", "importance")
        ]
        assert found == [False, False, True]
