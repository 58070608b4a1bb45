"""AWQ's search against brute force, its promises, and what it must not depend on."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress.arch.spec import FoldPair
from compress.errors import RecipeError
from compress.methods import awq, rtn
from compress.methods.awq import AwqConfig
from compress.methods.folding import UNDRIVEN, FoldReader, PairView, expand
from compress.methods.observed import Observed
from compress.methods.rtn import RtnConfig, column_importance
from compress.quant.rounding import clip_ratios, round_to_nearest
from compress.quant.scheme import PRESETS, QuantScheme

GROUP8 = QuantScheme(bits=3, group_size=8)
SCHEMES = {
    "int3 groups": GROUP8,
    "int4 asymmetric": QuantScheme(bits=4, symmetric=False, group_size=8),
    "int4 rows": QuantScheme(bits=4, granularity="channel", group_size=0),
    "int8 tensor": QuantScheme(bits=8, granularity="tensor", group_size=0),
    "fp8": PRESETS["FP8_DYNAMIC"],
    "nvfp4": PRESETS["NVFP4A16"],
}


def view_of(
    scheme: QuantScheme,
    *,
    rows: tuple[int, ...] = (12, 20),
    channels: int = 32,
    repeat: int = 1,
    seed: int = 0,
    outliers: float = 30.0,
) -> PairView:
    """Readers of inputs of which every eighth channel is `outliers` times larger."""
    g = torch.Generator().manual_seed(seed)
    pair = FoldPair("w", "norm", ("w.weight",), (0, channels), ("r",), "in", repeat, channels // 2)
    pair = replace(pair, head_dim=channels // 2 if repeat > 1 else 0)
    size = torch.ones(channels)
    size[::8] = outliers
    width = channels * repeat
    x = torch.randn(300, width, generator=g) * expand(pair, size)
    readers = tuple(FoldReader(torch.randn(n, width, generator=g), scheme) for n in rows)
    return PairView(pair, readers, x.T @ x / 300, x.abs().amax(0), x.abs().mean(0))


def cost(view: PairView, scale: Tensor | None, search: str = "importance") -> float:
    """tr(D H Dᵀ) with D = Q(W s) / s - W, from the definition, in fp64."""
    s = torch.ones_like(view.absmax) if scale is None else expand(view.pair, scale)
    total = 0.0
    for reader in view.readers:
        weight = reader.folded()
        hessian = view.hessian / s[:, None] / s
        importance = column_importance(hessian) if search == "importance" else None
        ratios = clip_ratios(search, reader.scheme, reader.signs)
        q = round_to_nearest(
            weight * s, reader.scheme, ratios, scale_dtype=torch.float32, importance=importance
        )
        d = q.dequantize().double() / s - weight
        total += float((d @ view.hessian.double() * d).sum())
    return total


def energy(view: PairView) -> float:
    return sum(float((r.folded() @ view.hessian * r.folded()).sum()) for r in view.readers)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
@pytest.mark.parametrize("search", ["minmax", "mse", "importance"])
def test_never_worse_than_plain_rounding(scheme: QuantScheme, search: str) -> None:
    for outliers in (1.0, 30.0):
        view = view_of(scheme, outliers=outliers)
        choice = awq.search(view, AwqConfig(scale_search=search))
        assert choice.plain is not None
        assert choice.loss is not None
        assert choice.loss <= choice.plain
        assert (choice.scale is None) == (choice.loss == choice.plain)
        if choice.scale is not None:
            assert choice.scale.shape == (32,)
            assert bool((torch.isfinite(choice.scale) & (choice.scale > 0)).all())


def test_candidates_are_rounded_with_the_signs_of_their_reader() -> None:
    view = view_of(GROUP8)
    readers = tuple(replace(reader, signs="positive") for reader in view.readers)
    positive = replace(view, readers=readers)
    choice, other = (awq.search(x, AwqConfig()) for x in (positive, view))
    assert choice.plain == pytest.approx(cost(positive, None) / energy(view), rel=1e-4)
    assert other.plain == pytest.approx(cost(view, None) / energy(view), rel=1e-4)
    assert other.plain < 0.95 * choice.plain


@pytest.mark.parametrize("duo", [True, False])
@pytest.mark.parametrize("search", ["minmax", "importance"])
def test_the_best_of_the_grid_by_brute_force(duo: bool, search: str) -> None:
    view = view_of(GROUP8)
    config = AwqConfig(grid=5, duo_scaling=duo, scale_search=search)
    choice = awq.search(view, config)
    relative = []
    for reader in view.readers:
        size = reader.weight.abs().reshape(-1, 4, 8)
        relative.append((size / size.amax(2, keepdim=True)).reshape(-1, 32))
    w = torch.cat(relative).mean(0)
    tried: list[Tensor | None] = [None]
    for ratio in (0.0, 0.25, 0.5, 0.75, 1.0):
        s = view.absmean**ratio / (w ** (1 - ratio) if duo else 1)
        tried.append(s / (s.max() * s.min()).sqrt())
    costs = [cost(view, s, search) for s in tried]
    best = tried[costs.index(min(costs))]
    assert best is not None
    assert choice.scale is not None
    torch.testing.assert_close(choice.scale, best, rtol=1e-5, atol=0)
    # Plain scales put the largest weight on a tie, which an ulp decides either way.
    near = 1e-2 if search == "minmax" else 1e-4
    assert choice.loss == pytest.approx(min(costs) / energy(view), rel=near)
    assert choice.plain == pytest.approx(costs[0] / energy(view), rel=near)
    assert choice.note == f"ratio {0.25 * (costs.index(min(costs)) - 1):.2f}"


def test_the_loss_is_what_rounding_says_afterwards() -> None:
    """Fold, then round with the method that follows: the report's error is the search's loss."""
    view = view_of(QuantScheme(bits=3, group_size=8), rows=(24,))
    choice = awq.search(view, AwqConfig())
    assert choice.scale is not None
    outcome = rtn.quantize(
        [view.readers[0].folded() * choice.scale],
        GROUP8,
        RtnConfig("importance"),
        scale_dtype=torch.float32,
        observed=Observed(hessian=view.hessian / choice.scale[:, None] / choice.scale),
    )[0]
    assert choice.loss == pytest.approx(outcome.error, rel=1e-4)
    plain = rtn.quantize(
        [view.readers[0].folded()],
        GROUP8,
        RtnConfig("importance"),
        scale_dtype=torch.float32,
        observed=Observed(hessian=view.hessian),
    )[0]
    assert choice.loss < 0.8 * plain.error


def test_outlier_channels_are_scaled_up() -> None:
    choice = awq.search(view_of(GROUP8), AwqConfig())
    assert choice.scale is not None
    others = torch.arange(32) % 8 != 0
    assert choice.scale[::8].min() > choice.scale[others].max()
    ends = choice.scale.max() * choice.scale.min()
    assert float(ends) == pytest.approx(1.0, rel=1e-4)


def test_grouped_attention_scales_channels_that_several_columns_read() -> None:
    view = view_of(GROUP8, repeat=3)
    choice = awq.search(view, AwqConfig())
    assert choice.scale is not None
    assert choice.scale.shape == (32,)
    assert choice.loss == pytest.approx(cost(view, choice.scale) / energy(view), rel=1e-4)


def test_the_search_does_not_depend_on_units() -> None:
    """Inputs in other units (a power of two), rows in another order: the same scales."""
    view = view_of(GROUP8)
    choice = awq.search(view, AwqConfig())
    larger = replace(
        view, hessian=view.hessian * 16, absmax=view.absmax * 4, absmean=view.absmean * 4
    )
    flipped = replace(
        view, readers=tuple(replace(r, weight=r.weight.flip(0)) for r in view.readers)
    )
    for other in (awq.search(larger, AwqConfig()), awq.search(flipped, AwqConfig())):
        assert other.scale is not None
        assert choice.scale is not None
        torch.testing.assert_close(other.scale, choice.scale, rtol=1e-4, atol=0)
        assert other.note == choice.note
        assert other.loss == pytest.approx(choice.loss, rel=1e-4)


def test_an_earlier_fold_is_part_of_what_is_scaled() -> None:
    view = view_of(GROUP8)
    factor = torch.exp2(torch.randn(32, generator=torch.Generator().manual_seed(7)))
    divided = tuple(replace(r, weight=r.weight / factor, columns=factor) for r in view.readers)
    for a, b in zip(divided, view.readers, strict=True):
        torch.testing.assert_close(a.folded(), b.folded())
    choice = awq.search(view, AwqConfig())
    same = awq.search(replace(view, readers=divided), AwqConfig())
    assert same.loss == pytest.approx(choice.loss, rel=1e-2)


def test_channels_that_are_never_driven_keep_scale_1() -> None:
    view = view_of(GROUP8)
    dead = torch.ones(32)
    dead[3] = 0
    view = replace(view, hessian=view.hessian * dead * dead[:, None], absmean=view.absmean * dead)
    choice = awq.search(view, AwqConfig())
    assert choice.scale is not None
    assert choice.scale[3] == 1
    silent = replace(view, hessian=view.hessian * 0, absmean=view.absmean * 0)
    nothing = awq.search(silent, AwqConfig())
    assert (nothing.scale, nothing.note) == (None, UNDRIVEN)


def test_a_pair_without_quantized_readers_is_left_alone() -> None:
    choice = awq.search(replace(view_of(GROUP8), readers=()), AwqConfig())
    assert choice.scale is None
    assert "quantized" in choice.note


def test_rows_are_sampled_evenly_over_all_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awq, "ROWS", 10)
    view = view_of(GROUP8, rows=(3, 37))
    sampled = awq.sample_rows(view)
    assert [s.shape[0] for s in sampled] == [1, 10]
    assert torch.equal(sampled[1], view.readers[1].weight[::4])
    choice = awq.search(view, AwqConfig())
    assert choice.plain is not None
    assert choice.loss is not None
    assert choice.loss <= choice.plain


@pytest.mark.parametrize("grid", [-1, 0, 1])
def test_a_grid_has_two_ratios_at_least(grid: int) -> None:
    with pytest.raises(RecipeError, match=f"grid is {grid}; a search tries 2 ratios or more"):
        AwqConfig(grid=grid)
