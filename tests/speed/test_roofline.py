"""Formulas of the roofline against numbers worked out by hand, and what must hold for any."""

from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.runtime.sequences.limits import Limits
from compress.speed.forecast import LoadShape, cache_tokens, forecast
from compress.speed.left import left
from compress.speed.rates import Calibrated
from compress.speed.roofline import (
    Cost,
    Curve,
    EngineRates,
    Hardware,
    LookRates,
    ProductRates,
    best_batch,
    bytes_read,
    ceiling,
    compute_bound_batch,
    expected,
    first_token,
    first_token_ceiling,
    intensity,
    line,
    operations,
    texts_that_fit,
)
from compress.speed.workload import (
    AttentionWork,
    Looks,
    Product,
    StepLoad,
    Workload,
    decode_load,
    prompt_load,
    prompt_loads,
    touched,
)

# Two layers, one with a window of 10; 4 heads of 8, 2 of them for keys and values, in fp32.
DENSE = Workload(
    products=(
        Product((100, 50), "block", "dense", 2, 20_000),
        Product((300, 50), "head", "dense", 1, 60_000),
    ),
    other_bytes=7_000,
    attention=(AttentionWork((None, 10), products=4 * (8 + 8), state_bytes=2 * 2 * 8 * 4),),
)
ATTENTION = DENSE.attention[0]
MIXTURE = replace(
    DENSE,
    products=(*DENSE.products, Product((40, 50), "expert", "dense", 2 * 8, 8_000, experts=8)),
    chosen=2,
)
MACHINE = Hardware(bandwidth=1e6, flops=1e7)
FLAT = Curve(((1.0, 1.0),))


def always(curve: Curve) -> ProductRates:
    """Whatever a step reads."""
    return ProductRates(((0.0, curve),))


RATES = EngineRates(
    products=(always(Curve(((1.0, 2.0), (16.0, 5.0)))), always(Curve(((1.0, 3.0),)))),
    looks=(LookRates(Curve(((0.0, 0.01),)), 0.02),),
    between=FLAT,
    host=Curve(((1.0, 0.5), (64.0, 1.13))),
)
batches = st.integers(1, 4096)


def test_memory_and_keys_and_values() -> None:
    assert DENSE.weight_bytes == 7_000 + 2 * 20_000 + 60_000
    assert DENSE.kv_bytes_per_token == 256
    assert DENSE.kv_bytes(8) == 8 * 256
    assert DENSE.kv_bytes(100) == (100 + 10) * 128  # the window keeps ten


def test_a_step_reads_weights_once_and_all_keys_and_values() -> None:
    load = decode_load(DENSE, 3, 100)
    assert bytes_read(DENSE, load) == 100_000 + 3 * 110 * 128
    products = 3 * (2 * 5_000 + 15_000)
    assert operations(DENSE, load) == 2 * products + 4 * 4 * 8 * 3 * 110
    assert intensity(DENSE, load) == operations(DENSE, load) / bytes_read(DENSE, load)


def test_a_step_without_logits_does_not_read_the_head() -> None:
    load = prompt_load(DENSE, 0, 20)
    assert bytes_read(DENSE, load) == 40_000 + (20 + 20) * 128
    assert operations(DENSE, load) == 2 * 20 * 10_000 + 4 * 32 * ATTENTION.pairs(0, 20)


@given(st.integers(0, 60), st.integers(1, 60))
def test_pairs_are_those_of_each_token(start: int, count: int) -> None:
    each = [ATTENTION.seen(position + 1) for position in range(start, start + count)]
    assert ATTENTION.pairs(start, start + count) == sum(each)


@given(st.integers(0, 60), st.integers(1, 60))
def test_a_chunk_reads_the_positions_that_any_of_its_tokens_sees(start: int, count: int) -> None:
    seen = [
        {at for p in range(start, start + count) for at in range(max(0, p - window + 1), p + 1)}
        for window in (1000, 10)
    ]
    assert prompt_load(DENSE, start, start + count).looks[0].states == sum(map(len, seen))


@given(st.integers(1, 200), st.integers(1, 64))
def test_chunks_of_a_prompt_are_the_prompt(length: int, most: int) -> None:
    loads = list(prompt_loads(DENSE, length, most))
    assert sum(load.tokens for load in loads) == length
    assert sum(load.looks[0].several for load in loads) == ATTENTION.pairs(0, length)
    assert [load.wanted for load in loads] == [0] * (len(loads) - 1) + [1]
    assert max(load.tokens for load in loads) <= most


def test_the_longer_of_bytes_and_operations_decides() -> None:
    load = decode_load(DENSE, 3, 100)
    slow_memory, slow_products = Hardware(1.0, 1e30), Hardware(1e30, 1.0)
    assert ceiling(DENSE, slow_memory, load) == bytes_read(DENSE, load)
    assert ceiling(DENSE, slow_products, load) == operations(DENSE, load)
    assert first_token_ceiling(DENSE, slow_products, 40, 16) == pytest.approx(
        sum(operations(DENSE, load) for load in prompt_loads(DENSE, 40, 16))
    )


def test_products_decide_from_where_both_terms_meet() -> None:
    # 100,000 bytes at 1e6 a second are 0.1 s; a text's 50,000 operations at 1e7 are 0.005 s.
    bound = compute_bound_batch(DENSE, MACHINE)
    assert bound == pytest.approx(20, rel=1e-5)
    # The sheet's closed form: operations * bytes a weight / (2 * bandwidth).
    assert bound == pytest.approx(MACHINE.flops * 4 / (2 * MACHINE.bandwidth), rel=1e-5)
    assert compute_bound_batch(DENSE, Hardware(1.0, 1e30)) == float("inf")


@pytest.mark.parametrize("work", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_both_terms_are_equal_at_the_bound(work: Workload) -> None:
    bound = compute_bound_batch(work, MACHINE)
    load = StepLoad(bound, bound, bound, (Looks(),))
    read = bytes_read(work, load) / MACHINE.bandwidth
    assert read == pytest.approx(operations(work, load) / MACHINE.flops, rel=1e-4)


def test_experts_that_a_step_touches() -> None:
    assert touched(8, 2, 1) == pytest.approx(2)
    assert touched(8, 2, 2) == pytest.approx(8 * (1 - 0.75**2))
    assert touched(8, 2, 1000) == pytest.approx(8)
    # One token: two of eight experts, in both layers, are read and computed.
    one = decode_load(MIXTURE, 1, 1)
    plain = decode_load(DENSE, 1, 1)
    assert bytes_read(MIXTURE, one) - bytes_read(DENSE, plain) == pytest.approx(2 * 2 * 8_000)
    assert operations(MIXTURE, one) - operations(DENSE, plain) == 2 * 2 * 2 * 2_000


def test_an_expected_step_is_the_sum_of_its_parts() -> None:
    cost = expected(DENSE, RATES, decode_load(DENSE, 16, 50))
    assert cost.products == 2 * 5.0
    assert cost.head == 3.0
    assert cost.attention == pytest.approx(16 * (50 + 10) * 0.01)
    assert cost.between == 1.0
    assert cost.host == pytest.approx(0.65)
    assert cost.total == pytest.approx(10 + 3 + 9.6 + 1 + 0.65)


def test_a_prompt_costs_its_chunks_and_one_row_of_the_head() -> None:
    total = first_token(DENSE, RATES, 32, 16)
    pairs = ATTENTION.pairs(0, 32)
    assert total == pytest.approx(2 * (2 * 5.0) + 3.0 + pairs * 0.02 + 2 * 1.0 + 2 * 0.5)


def test_rows_are_filled_up() -> None:
    nine = decode_load(DENSE, 9, 1)
    filled = replace(RATES, multiple=16)
    assert expected(DENSE, filled, nine).products == 2 * 5.0
    assert expected(DENSE, RATES, nine).products == pytest.approx(2 * (2 + 3 * 8 / 15))


def test_tiles_read_weights_for_each_sixteen_rows() -> None:
    tiled = replace(RATES, multiple=16, tiled=True)
    assert expected(DENSE, tiled, decode_load(DENSE, 33, 1)).products == 3 * 2 * 5.0
    assert expected(DENSE, tiled, decode_load(DENSE, 33, 1)).head == 3 * 3.0


def test_each_touched_expert_has_its_share_of_the_tokens() -> None:
    growing = Curve(((1.0, 1.0), (101.0, 101.0)))
    rates = replace(RATES, products=(*RATES.products, always(growing)))
    plain = expected(DENSE, RATES, decode_load(DENSE, 4, 1)).products
    found = expected(MIXTURE, rates, decode_load(MIXTURE, 4, 1)).products
    experts = 8 * (1 - 0.75**4)
    rows = -(-4 * 2 // experts)
    assert found - plain == pytest.approx(2 * experts * rows)


def test_a_product_takes_longer_where_caches_hold_less_of_the_weight() -> None:
    by_bytes = ((100.0, Curve(((1.0, 2.0), (3.0, 6.0)))), (300.0, Curve(((1.0, 4.0), (3.0, 6.0)))))
    rates = ProductRates(by_bytes)
    assert [rates.at(1, read) for read in (0, 100, 150, 200, 300, 1e9)] == [2, 2, 2.5, 3, 4, 4]
    assert [rates.at(3, read) for read in (0, 200, 1e9)] == [6, 6, 6]  # operations decide
    assert rates.at(2, 200) == 4.5


@given(batches, batches, st.integers(1, 2000))
@pytest.mark.parametrize("work", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_more_texts_never_take_less(work: Workload, a: int, b: int, length: int) -> None:
    low, high = sorted((a, b))
    rates = replace(RATES, products=(*RATES.products, always(FLAT))[: len(work.products)])
    few, many = decode_load(work, low, length), decode_load(work, high, length)
    assert ceiling(work, MACHINE, few) <= ceiling(work, MACHINE, many) * (1 + 1e-9)
    assert expected(work, rates, few).total <= expected(work, rates, many).total * (1 + 1e-9)
    assert low / ceiling(work, MACHINE, few) <= high / ceiling(work, MACHINE, many) * (1 + 1e-9)


def test_texts_fit_in_whole_blocks() -> None:
    assert texts_that_fit(DENSE, 10 * DENSE.kv_bytes(48), 40, 16) == 10
    assert texts_that_fit(DENSE, 10 * DENSE.kv_bytes(48) - 1, 40, 16) == 9
    assert texts_that_fit(DENSE, 10, 40, 16) == 0


def test_the_best_batch_is_the_smallest_with_nearly_the_most() -> None:
    costly_start = replace(
        RATES,
        looks=(LookRates(Curve(((0.0, 0.0),)), 0.02),),
        host=FLAT,
        products=(always(FLAT),) * 2,
    )
    assert best_batch(DENSE, costly_start, 10, 100) == 100  # more texts cost nothing
    linear = Curve(((0.0, 0.0), (1.0, 1.0)))
    every = replace(costly_start, products=(always(linear),) * 2, between=linear, host=linear)
    assert best_batch(DENSE, every, 10, 100) == 1  # nothing is gained
    half = replace(every, between=Curve(((0.0, 4.0), (1.0, 5.0))))
    # 5 b + 4 seconds for b texts: 95 % of 0.199 a second come from b = 16 on.
    assert best_batch(DENSE, half, 10, 100) == 16


def test_the_cache_is_a_share_of_what_is_free() -> None:
    limits = Limits()
    assert limits.running == 256
    roomy, tight = (
        Calibrated(DENSE, replace(MACHINE, free_bytes=free), RATES) for free in (None, 1_000_000)
    )
    assert cache_tokens(roomy, 64, limits) == 64 * 256
    assert cache_tokens(tight, 64, limits) == 300_000 // 256
    assert cache_tokens(tight, 2, limits) == 2 * 256  # no more than whole contexts


def test_steps_are_those_in_the_middle_of_an_output() -> None:
    asked = LoadShape((2, 4), prompt=40, output=20)
    facts = forecast(Calibrated(DENSE, MACHINE, RATES), asked, 64)
    for step, batch in zip(facts["steps"], asked.batches, strict=True):
        load = decode_load(DENSE, batch, 50)
        assert (step["batch"], step["length"]) == (batch, 50)
        seconds, best = expected(DENSE, RATES, load).total, ceiling(DENSE, MACHINE, load)
        assert step["expected_ms"] == pytest.approx(1000 * seconds, rel=1e-3)
        assert step["at_best_ms"] == pytest.approx(1000 * best, rel=1e-3)
        assert step["tokens_per_second"] == pytest.approx(batch / seconds, rel=1e-3)
        assert step["memory_bytes"] == DENSE.weight_bytes + batch * DENSE.kv_bytes(50)
    assert facts["stored_bytes"] == {"dense": 100_000}
    assert facts["cache_texts"] == 64 * 256 * 256 // DENSE.kv_bytes(64)  # in blocks of 16
    assert facts["compute_bound_batch"] == 20


def test_curves_are_lines_between_and_beyond_points() -> None:
    curve = Curve(((1.0, 2.0), (3.0, 6.0), (5.0, 7.0)))
    assert [curve.at(x) for x in (0.5, 1, 2, 3, 4, 5, 9)] == [2, 2, 4, 6, 6.5, 7, 9]
    assert line([(1.0, 3.0), (2.0, 2.0), (3.0, 4.0)]).points == ((1, 3), (2, 3), (3, 4))


@given(batches, st.integers(1, 500), st.floats(1e3, 1e9), st.floats(1e3, 1e9))
def test_what_is_left_is_above_the_best(
    batch: int, length: int, bandwidth: float, flops: float
) -> None:
    """No step at its best leaves anything, whichever part decides; what is slower leaves all that
    is more, where it is."""
    machine, load = Hardware(bandwidth, flops), decode_load(DENSE, batch, length)
    read = 100_000 / bandwidth
    computed = 2 * batch * 25_000 / flops
    seen = decode_load(replace(DENSE, products=()), batch, length)
    attention = ceiling(replace(DENSE, products=()), machine, seen)
    best = Cost(0.75 * max(read, computed), 0.25 * max(read, computed), attention, 0.0, 0.0)
    nothing = left(DENSE, machine, load, best)
    assert all(abs(x) < 1e-9 for x in astuple(nothing))
    slower = replace(best, head=best.head + 1, attention=attention + 2, between=3.0, host=4.0)
    found = left(DENSE, machine, load, slower)
    assert found.weights + found.compute == pytest.approx(1)
    assert (found.weights > 0) == (read >= computed)
    assert (found.cache, found.between, found.outside) == pytest.approx((2, 3, 4))
    assert not any(astuple(left(DENSE, machine, load, Cost(0.0, 0.0, 0.0, 0.0, 0.0))))
