"""Scales by output: the exact cost of a group, by brute force over all candidates."""

import pytest
import torch
from torch import Tensor

from compress.methods import rtn
from compress.methods.observed import Observed
from compress.methods.rtn import RtnConfig
from compress.quant import output_scales
from compress.quant.output_scales import scales_by_output
from compress.quant.rounding import choose_scales, clip_ratios, encode
from compress.quant.scheme import QuantScheme

SCHEMES = [
    QuantScheme(bits=3, group_size=8),
    QuantScheme(bits=4, symmetric=False, group_size=8),
    QuantScheme(bits=3, group_size=9),  # the last group is short
    QuantScheme(bits=4, granularity="channel", group_size=0),
    QuantScheme(bits=4, symmetric=False, granularity="tensor", group_size=0),
]
IDS = [scheme.describe() for scheme in SCHEMES]


def problem(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight [10, 24] and the Hessian of strongly correlated inputs."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 24, generator=g) + 2 * torch.randn(200, 1, generator=g)
    return torch.randn(10, 24, generator=g), x.T @ x / 200


def group_costs(weight: Tensor, q: Tensor, hessian: Tensor, step: int) -> Tensor:
    """d H_gg dᵀ of every row and group, in fp64: [N, G]."""
    d, h = (q - weight).double(), hessian.double()
    runs = [slice(start, start + step) for start in range(0, weight.shape[1], step)]
    return torch.stack([((d[:, r] @ h[r, r]) * d[:, r]).sum(1) for r in runs], dim=1)


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cheapest_candidate_wins(scheme: QuantScheme, dtype: torch.dtype) -> None:
    weight, hessian = problem()
    ratios = clip_ratios("importance", scheme)
    step = scheme.columns_per_scale(24)
    tried = []
    for ratio in ratios:
        scale, zero = choose_scales(weight, scheme, ratio.reshape(1), dtype)
        q = encode(weight, scheme, scale, zero).dequantize()
        cost = group_costs(weight, q, hessian, step)
        tried.append(cost.sum().reshape(1, 1) if scheme.granularity == "tensor" else cost)
    scale, zero = scales_by_output(weight, scheme, ratios, dtype, hessian)
    assert scale.dtype == dtype
    assert (zero is None) == scheme.symmetric
    assert scale.shape == scheme.scale_shape(10, 24)
    q = encode(weight, scheme, scale, zero).dequantize()
    cost = group_costs(weight, q, hessian, step)
    cost = cost.sum().reshape(1, 1) if scheme.granularity == "tensor" else cost
    torch.testing.assert_close(cost, torch.stack(tried).amin(0), rtol=1e-3, atol=1e-9)


def test_rows_do_not_depend_on_how_many_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = problem(1)
    ratios = clip_ratios("importance", SCHEMES[0])
    whole = scales_by_output(weight, SCHEMES[0], ratios, torch.float32, hessian)[0]
    monkeypatch.setattr(output_scales, "RUN", 3 * 24)
    assert torch.equal(
        scales_by_output(weight, SCHEMES[0], ratios, torch.float32, hessian)[0], whole
    )


def test_inputs_that_move_together_are_rounded_better() -> None:
    """The whole layer's error falls although only groups are looked at."""
    errors = {}
    for search in ("mse", "importance", "output"):
        config = RtnConfig(search)
        total = 0.0
        for seed in range(5):
            weight, hessian = problem(seed)
            (outcome,) = rtn.quantize(
                [weight],
                SCHEMES[0],
                config,
                scale_dtype=torch.bfloat16,
                observed=Observed(hessian=hessian),
            )
            total += outcome.error
        errors[search] = total
    assert errors["output"] < 0.8 * min(errors["mse"], errors["importance"])


def test_without_data_and_with_dead_columns() -> None:
    weight, hessian = problem()
    config = RtnConfig("output")
    assert rtn.needs(config).hessian
    (outcome,) = rtn.quantize(
        [weight],
        SCHEMES[0],
        config,
        scale_dtype=torch.float32,
        observed=Observed(hessian=hessian * 0, expert_tokens=0),
    )
    assert outcome.kept == rtn.UNSEEN
    dead = torch.ones(24)
    dead[:8] = 0
    scale, _ = scales_by_output(
        weight,
        SCHEMES[0],
        clip_ratios("importance", SCHEMES[0]),
        torch.float32,
        hessian * dead * dead[:, None],
    )
    mse, _ = choose_scales(weight, SCHEMES[0], clip_ratios("mse", SCHEMES[0]), torch.float32)
    assert torch.equal(scale[:, 0], mse[:, 0])  # nothing but the weights to go by
