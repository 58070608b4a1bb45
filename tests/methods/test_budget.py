"""The choice under a budget is the best of all choices, found without trying them."""

import random
import time
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.errors import RecipeError
from compress.methods import budget
from compress.methods.budget import Allocation, Option, Unit, bytes_for, choose

Pairs = list[list[tuple[int, float]]]
# Few values, so that sums of bytes and of losses coincide often.
SIZES = st.integers(0, 12)
LOSSES = st.one_of(st.integers(-3, 6).map(float), st.floats(-1e3, 1e3))
PROBLEMS = st.lists(
    st.lists(st.tuples(SIZES, LOSSES), min_size=1, max_size=4), min_size=0, max_size=5
)


def units_of(problem: Pairs) -> list[Unit]:
    return [
        Unit(f"unit{i}", tuple(Option(f"scheme{k}", *pair) for k, pair in enumerate(options)))
        for i, options in enumerate(problem)
    ]


def totals(units: list[Unit], picked: tuple[int, ...]) -> tuple[float, int]:
    """(loss, bytes), added from the first unit to the last."""
    loss, size = 0.0, 0
    for unit, place in zip(units, picked, strict=True):
        loss, size = loss + unit.options[place].loss, size + unit.options[place].bytes
    return loss, size


def best_of_all(units: list[Unit], most: int) -> tuple[float, int] | None:
    every = product(*(range(len(unit.options)) for unit in units))
    found = [totals(units, picked) for picked in every]
    return min((f for f in found if f[1] <= most), default=None)


@settings(max_examples=150, deadline=None)
@given(PROBLEMS, st.integers(-1, 60))
def test_no_choice_is_better(problem: Pairs, most: int) -> None:
    units = units_of(problem)
    best = best_of_all(units, most)
    if best is None:
        with pytest.raises(RecipeError, match="take"):
            choose(units, most)
        return
    found = choose(units, most)
    assert (found.loss, found.bytes) == best == totals(units, found.picked)
    assert found.gap == 0
    assert choose(units, most) == found


@settings(max_examples=150, deadline=None)
@given(PROBLEMS.filter(bool), st.integers(0, 60), st.integers(2, 4))
def test_merged_partial_choices_stay_within_the_gap(problem: Pairs, most: int, few: int) -> None:
    units = units_of(problem)
    best = best_of_all(units, most)
    if best is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "STATES", 0)
        patch.setattr(budget, "_LEAST", few)
        found = choose(units, most)
    assert (found.loss, found.bytes) == totals(units, found.picked)
    assert found.bytes <= most
    assert best[0] <= found.loss <= best[0] + found.gap + 1e-9 * (1 + abs(best[0]))


def test_ties_go_to_fewer_bytes() -> None:
    units = units_of([[(8, 1.0), (4, 1.0)], [(3, 2.0), (5, 2.0)]])
    assert choose(units, 100) == Allocation((1, 0), 7, 3.0)


def test_equal_options_go_to_the_first() -> None:
    assert choose(units_of([[(4, 1.0), (4, 1.0)]] * 3), 12).picked == (0, 0, 0)


def test_a_loose_budget_takes_the_least_loss_and_a_tight_one_the_fewest_bytes() -> None:
    units = units_of([[(2, 5.0), (4, 1.0), (8, 0.0)]] * 4)
    assert choose(units, 10**6).picked == (2, 2, 2, 2)
    assert choose(units, 8) == Allocation((0, 0, 0, 0), 8, 20.0)


def test_the_hull_alone_would_miss_the_best() -> None:
    """Options above the convex hull are taken where they fill the budget."""
    units = units_of([[(0, 10.0), (6, 7.0), (10, 0.0)], [(0, 1.0), (4, 0.5)]])
    assert choose(units, 9).picked == (1, 0)


def test_a_budget_below_the_smallest_names_the_least() -> None:
    units = units_of([[(1000, 1.0), (2000, 0.0)], [(500, 1.0)]])
    with pytest.raises(RecipeError) as refusal:
        choose(units, 1499, weights=4000)
    assert str(refusal.value) == (
        "target: the budget is 1,499 bytes, but the smallest schemes of all layers together take"
        " 1,500 (3.000 bits a weight); raise the target or allow smaller schemes"
    )
    with pytest.raises(RecipeError, match=r"take 1,500; raise"):
        choose(units, 0)
    assert choose(units, 1500).bytes == 1500


def test_no_units_take_nothing() -> None:
    assert choose([], 0) == Allocation((), 0, 0.0)


def large(layers: int, seed: int) -> list[Unit]:
    """The 7B shape: four kinds of units a block, schemes of 3 to 16 bits, losses of their own."""
    draw = random.Random(seed)
    weights = (3 * 4096 * 4096, 4096 * 4096, 2 * 4096 * 11008, 4096 * 11008)
    bits = (3.0, 3.125, 4.0, 4.125, 5.125, 8.0, 16.0)
    return [
        Unit(
            f"{layer}.{count}",
            tuple(Option(str(b), int(count * b / 8), draw.uniform(0.5, 2) * 4.0**-b) for b in bits),
        )
        for layer in range(layers)
        for count in weights
    ]


def test_a_large_model_is_quick_and_exact() -> None:
    units = large(32, 0)
    started = time.perf_counter()
    weights = sum(u.options[-1].bytes // 2 for u in units)
    found = choose(units, bytes_for(4.25, weights))
    assert time.perf_counter() - started < 20
    assert found.gap == 0
    assert found.bytes <= bytes_for(4.25, weights)


def test_bits_become_bytes() -> None:
    assert bytes_for(4.25, 1024) == 544
    assert bytes_for(4.25, 3) == 1  # never more than was asked for
    assert bytes_for(4, 10**12) == 5 * 10**11


@pytest.mark.parametrize("bits", [0, -1.0, float("nan"), float("inf")])
def test_bits_that_are_no_number_above_0_are_refused(bits: float) -> None:
    with pytest.raises(RecipeError, match=r"bits_per_weight is .*; it is a number above 0"):
        bytes_for(bits, 10)
