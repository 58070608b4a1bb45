"""GPTQ against brute force, plain rounding and its own equations."""

from itertools import product

import pytest
import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.methods import gptq, rtn
from compress.methods.gptq import NO_FACTOR, GptqConfig, factorise
from compress.methods.observed import Observed
from compress.methods.outcome import Outcome
from compress.methods.rtn import RtnConfig
from compress.quant.scheme import QuantScheme

CHANNEL4 = QuantScheme(bits=4, granularity="channel", group_size=0)
GROUP8 = QuantScheme(bits=4, group_size=8)


def hessian_of(columns: int, tokens: int, seed: int) -> Tensor:
    """Mean of x xᵀ over correlated inputs, fp32 [columns, columns]."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=g) / columns**0.5 + torch.eye(columns) / 2
    x = torch.randn(tokens, columns, generator=g) @ mix
    return x.T @ x / tokens


def weight_of(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1000 + seed))


def solve(weight: Tensor, scheme: QuantScheme, hessian: Tensor, **options: object) -> Outcome:
    config = GptqConfig(**options)
    (outcome,) = gptq.quantize(
        [weight], scheme, config, scale_dtype=torch.bfloat16, observed=Observed(hessian=hessian)
    )
    return outcome


def rounded(weight: Tensor, scheme: QuantScheme, hessian: Tensor, search: str) -> Outcome:
    config = RtnConfig(search)
    (outcome,) = rtn.quantize(
        [weight], scheme, config, scale_dtype=torch.bfloat16, observed=Observed(hessian=hessian)
    )
    return outcome


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("granularity", "act_order"),
    [
        *product(["tensor", "channel", "group"], ["none", "static"]),
        ("group", "group"),  # the plan refuses other granularities with it
    ],
)
def test_every_scheme_is_valid_and_no_worse_than_rounding(
    bits: int, symmetric: bool, granularity: str, act_order: str
) -> None:
    size = 8 if granularity == "group" else 0
    scheme = QuantScheme(bits, symmetric, granularity, size)
    weight, hessian = weight_of(6, 24, bits), hessian_of(24, 200, bits)
    outcome = solve(weight, scheme, hessian, act_order=act_order)
    q = outcome.quantized
    groups = {"tensor": (1, 1), "channel": (6, 1), "group": (6, 3)}[granularity]
    assert q.codes.shape == (6, 24)
    assert q.scale.shape == groups
    assert q.scale.dtype == torch.bfloat16
    assert (q.scale != 0).all()
    assert int(q.codes.min()) >= scheme.code_min
    assert int(q.codes.max()) <= scheme.code_max
    assert (q.zero is None) == symmetric
    if q.zero is not None:
        assert q.zero.shape == groups
        assert q.zero.dtype == torch.int8
    assert (q.g_idx is None) == (act_order != "group")
    plain = rounded(weight, scheme, hessian, "importance")
    assert outcome.error <= plain.error


@pytest.mark.parametrize("act_order", ["none", "static", "group"])
def test_correlated_inputs_cost_much_less_than_with_plain_rounding(act_order: str) -> None:
    gains = []
    for seed in range(8):
        weight, hessian = weight_of(16, 64, seed), hessian_of(64, 512, seed)
        outcome = solve(weight, GROUP8, hessian, act_order=act_order)
        assert outcome.method == "gptq"
        gains.append(outcome.error / rounded(weight, GROUP8, hessian, "importance").error)
    assert sum(gains) / len(gains) < 0.75


def test_close_to_the_best_codes_there_are() -> None:
    scheme = QuantScheme(bits=3, granularity="channel", group_size=0)
    costs = {"gptq": 0.0, "rtn": 0.0, "best": 0.0}
    for seed in range(40):
        weight, hessian = weight_of(1, 4, seed), hessian_of(4, 60, seed)
        options = {"scale_search": "minmax", "damping": 1e-6, "act_order": "none"}
        outcome = solve(weight, scheme, hessian, **options)
        scale = float(outcome.quantized.scale)
        every = torch.tensor(list(product(range(-4, 4), repeat=4))) * scale - weight
        costs["best"] += float(((every @ hessian) * every).sum(1).min())
        for name, found in (
            ("gptq", outcome),
            ("rtn", rounded(weight, scheme, hessian, "minmax")),
        ):
            assert float(found.quantized.scale) == scale
            delta = found.quantized.dequantize() - weight
            costs[name] += float((delta @ hessian * delta).sum())
    assert costs["gptq"] < 1.35 * costs["best"]
    assert costs["gptq"] < 0.8 * costs["rtn"]


@pytest.mark.parametrize("scheme", [CHANNEL4, GROUP8, QuantScheme(4, False, "tensor", 0)])
@pytest.mark.parametrize("act_order", ["none", "static"])
def test_layers_solved_together_are_solved_apart(scheme: QuantScheme, act_order: str) -> None:
    hessian = hessian_of(48, 300, 1)
    weights = [weight_of(rows, 48, rows) for rows in (16, 8, 24)]
    config = GptqConfig(act_order=act_order)
    together = gptq.quantize(
        weights, scheme, config, scale_dtype=torch.float32, observed=Observed(hessian=hessian)
    )
    for weight, one in zip(weights, together, strict=True):
        (alone,) = gptq.quantize(
            [weight], scheme, config, scale_dtype=torch.float32, observed=Observed(hessian=hessian)
        )
        assert torch.equal(one.quantized.codes, alone.quantized.codes)
        assert torch.equal(one.quantized.scale, alone.quantized.scale)
        assert one.error == alone.error


def test_cutting_the_stack_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hessian = hessian_of(16, 100, 2)
    weights = [weight_of(8, 16, seed) for seed in range(5)]
    args = (weights, CHANNEL4, GptqConfig())
    whole = gptq.quantize(*args, scale_dtype=torch.float32, observed=Observed(hessian=hessian))
    monkeypatch.setattr(gptq, "STACKED", 2 * 8 * 16)
    assert [len(stack) for stack in gptq._stacks(weights)] == [2, 2, 1]
    cut = gptq.quantize(*args, scale_dtype=torch.float32, observed=Observed(hessian=hessian))
    for a, b in zip(whole, cut, strict=True):
        assert torch.equal(a.quantized.codes, b.quantized.codes)


@pytest.mark.parametrize("scheme", [CHANNEL4, GROUP8, QuantScheme(3, False, "group", 4)])
def test_independent_inputs_leave_nothing_to_make_up_for(scheme: QuantScheme) -> None:
    weight, eye = weight_of(8, 24, 3), torch.eye(24)
    found = solve(weight, scheme, eye).quantized
    plain = rounded(weight, scheme, eye, "mse").quantized
    assert torch.equal(found.codes, plain.codes)
    assert torch.equal(found.scale, plain.scale)


def test_dead_columns_keep_their_nearest_codes() -> None:
    weight, hessian = weight_of(8, 24, 4), hessian_of(24, 200, 4)
    for column in (0, 7, 23):
        hessian[column] = 0
        hessian[:, column] = 0
    outcome = solve(weight, CHANNEL4, hessian)
    assert outcome.dead == 3
    q = outcome.quantized
    nearest = (weight / q.scale.float()).round().clamp(-8, 7)
    for column in (0, 7, 23):
        assert torch.equal(q.codes[:, column].float(), nearest[:, column])
    assert not torch.equal(q.codes.float(), nearest)


@pytest.mark.parametrize("act_order", ["static", "group"])
def test_act_order_visits_columns_by_falling_energy(act_order: str) -> None:
    weight, hessian = weight_of(8, 32, 5), hessian_of(32, 200, 5)
    hessian = hessian * torch.linspace(0.2, 3, 32)[:, None] * torch.linspace(0.2, 3, 32)
    order = torch.argsort(hessian.diagonal(), descending=True)
    found = solve(
        weight, CHANNEL4 if act_order == "static" else GROUP8, hessian, act_order=act_order
    )
    factor = factorise(hessian, GptqConfig(act_order=act_order))
    assert factor is not None
    assert factor.order is not None
    assert torch.equal(factor.order, order)
    if act_order == "static":
        return
    # The same problem with its columns sorted beforehand.
    sorted_h = hessian[order][:, order]
    before = solve(weight[:, order], GROUP8, sorted_h, act_order="none").quantized
    back = torch.argsort(order)
    q = found.quantized
    assert torch.equal(q.codes, before.codes[:, back])
    assert torch.equal(q.dequantize(), before.dequantize()[:, back])
    assert q.g_idx is not None
    assert q.g_idx.dtype == torch.int32
    assert torch.equal(torch.bincount(q.g_idx.long()), torch.full((4,), 8))


def test_static_order_keeps_groups_in_storage_order() -> None:
    weight, hessian = weight_of(8, 32, 6), hessian_of(32, 200, 6)
    q = solve(weight, GROUP8, hessian, act_order="static").quantized
    assert q.g_idx is None
    assert torch.equal(q.column_groups(), torch.arange(32) // 8)


@pytest.mark.parametrize(
    ("name", "hessian"),
    [
        ("one token", torch.ones(16, 16)),
        ("rank 3", hessian_of(16, 3, 7)),
        ("two equal columns", torch.kron(hessian_of(8, 100, 7), torch.ones(2, 2))),
        ("zeros", torch.zeros(16, 16)),
        ("tiny", hessian_of(16, 100, 7) * 1e-30),
        ("large", hessian_of(16, 100, 7) * 1e30),
    ],
)
def test_singular_hessians_are_damped(name: str, hessian: Tensor) -> None:
    weight = weight_of(8, 16, 7)
    outcome = solve(weight, CHANNEL4, hessian)
    assert outcome.method == "gptq" or outcome.kept
    assert torch.isfinite(outcome.quantized.dequantize()).all()
    assert 0 <= outcome.error < 0.1
    if outcome.method == "gptq":
        assert outcome.damping == 0.01


def test_the_ladder_climbs_until_it_holds_and_says_where() -> None:
    hessian = hessian_of(16, 100, 8)
    lowest = torch.linalg.eigvalsh(hessian)[0]
    hessian.diagonal().sub_(lowest + 0.03 * float(hessian.diagonal().mean()))  # indefinite
    outcome = solve(weight_of(4, 16, 8), CHANNEL4, hessian)
    assert outcome.method == "gptq" or outcome.kept
    factor = factorise(hessian, GptqConfig())
    assert factor is not None
    assert factor.damping == pytest.approx(0.1)
    zero = factorise(torch.ones(16, 16), GptqConfig(damping=0.0))
    assert zero is not None
    assert zero.damping >= 1e-4


def test_a_hopeless_hessian_keeps_plain_rounding_and_says_so() -> None:
    hessian = torch.eye(8)
    hessian[0, 1] = hessian[1, 0] = 1e6
    outcome = solve(weight_of(4, 8, 9), CHANNEL4, hessian)
    assert (outcome.method, outcome.kept) == ("rtn", NO_FACTOR)


def test_experts_with_too_few_tokens_are_rounded() -> None:
    weight, hessian = weight_of(4, 8, 10), hessian_of(8, 15, 10)
    args = ([weight, weight], CHANNEL4, GptqConfig())
    few = gptq.quantize(
        *args, scale_dtype=torch.float32, observed=Observed(hessian=hessian, expert_tokens=15)
    )
    assert [o.method for o in few] == ["rtn", "rtn"]
    assert few[0].kept == "15 tokens reached the expert, 2 x 8 wanted"
    enough = gptq.quantize(
        *args, scale_dtype=torch.float32, observed=Observed(hessian=hessian, expert_tokens=16)
    )
    assert enough[0].kept is None or "expert" not in enough[0].kept


@pytest.mark.parametrize("act_order", ["none", "group"])
def test_an_expert_no_token_reached_is_rounded_and_judged_evenly(act_order: str) -> None:
    weight = weight_of(4, 16, 11)
    config = GptqConfig(min_tokens=0, act_order=act_order)
    (outcome,) = gptq.quantize(
        [weight],
        GROUP8,
        config,
        scale_dtype=torch.float32,
        observed=Observed(hessian=torch.zeros(16, 16), expert_tokens=0),
    )
    assert outcome.kept == "0 tokens reached the expert, 0 x 16 wanted"
    assert outcome.error > 0, "a layer that calibration never saw is not perfect"
    assert (outcome.quantized.g_idx is not None) == (act_order == "group")


@pytest.mark.parametrize("tokens", [0, 100])
@pytest.mark.parametrize("act_order", ["none", "static", "group"])
def test_scales_have_the_signs_that_are_asked_for(act_order: str, tokens: int) -> None:
    """Those of an expert that is rounded plainly too."""
    for signs in ("both", "positive"):
        (outcome,) = gptq.quantize(
            [weight_of(16, 16, 14)],
            GROUP8,
            GptqConfig(signs=signs, act_order=act_order),
            scale_dtype=torch.float32,
            observed=Observed(hessian=hessian_of(16, 50, 14), expert_tokens=tokens),
        )
        assert (outcome.method == "rtn") == (tokens == 0)
        assert bool((outcome.quantized.scale > 0).all()) == (signs == "positive")


def test_inputs_are_left_alone() -> None:
    weight, hessian = weight_of(4, 16, 12), hessian_of(16, 50, 12)
    before = weight.clone(), hessian.clone()
    solve(weight, GROUP8, hessian, act_order="group")
    assert torch.equal(weight, before[0])
    assert torch.equal(hessian, before[1])


def test_a_transposed_view_is_as_good_as_a_copy() -> None:
    weight, hessian = weight_of(16, 8, 13), hessian_of(16, 50, 13)
    view = solve(weight.t(), GROUP8, hessian)
    copy = solve(weight.t().contiguous(), GROUP8, hessian)
    assert torch.equal(view.quantized.codes, copy.quantized.codes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": -0.1}, "damping is -0.1; it is a share of 0 or more, such as 0.01"),
        ({"damping": float("nan")}, "damping is nan; it is a share of 0 or more, such as 0.01"),
        ({"block_size": 0}, "block_size is 0; a block holds 1 column or more"),
        ({"min_tokens": -1.0}, "min_tokens is -1.0; it is 0 or more"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        GptqConfig(**options)
    assert str(caught.value) == message
