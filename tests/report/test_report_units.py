"""Numbers as people read them: no rounding may cross a unit or hide a difference."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.report import units

FACTORS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}


@given(st.integers(0, 10**17))
def test_a_size_reads_back_within_half_a_percent(count: int) -> None:
    number, unit = units.size(count).split()
    value = float(number.replace(",", ""))
    assert value * FACTORS[unit] == pytest.approx(count, rel=0.0051)
    assert value < 1000


@given(st.integers(0, 10**13), st.integers(1, 10**13))
def test_two_sizes_that_differ_read_differently(first: int, second: int) -> None:
    one, other = units.two_sizes(first, second)
    assert (one == other) == (first == second)


def test_two_sizes() -> None:
    assert units.two_sizes(5_120_000, 5_119_999) == ("5,120,000 bytes", "5,119,999 bytes")
    assert units.two_sizes(5_120_000, 4_000_000) == ("5.12 MB", "4.00 MB")


@given(st.floats(1e-5, 9e8))
def test_significant_digits_read_back(value: float) -> None:
    shown = units.significant(value)
    assert float(shown.replace(",", "")) == pytest.approx(value, rel=0.0051)
    assert "e" not in shown


@given(st.floats(allow_nan=True, allow_infinity=True), st.integers(2, 5))
def test_any_float_has_a_short_text(value: float, digits: int) -> None:
    assert 0 < len(units.significant(value, digits)) <= 14


def seconds_of(number: str, unit: str) -> float:
    return float(number.replace(",", "")) * {"s": 1, "min": 60, "h": 3600}[unit]


@given(st.floats(0.1, 1e7), st.floats(1.0, 20.0))
def test_a_span_has_two_digits_of_one_unit(low: float, times: float) -> None:
    *first, unit = units.span(low, low * times).split()
    assert float(first[0].replace(",", "")) == pytest.approx(low / seconds_of("1", unit), rel=0.051)
    assert seconds_of(first[-1], unit) == pytest.approx(low * times, rel=0.051)
    for number in first[::2]:
        assert len(number.replace(".", "").replace(",", "").strip("0")) <= 2


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (31.2, 57.9, "31 to 58 s"),
        (5220, 12240, "1.4 to 3.4 h"),
        (300, 1640, "5 to 27 min"),
        (1.004e6, 1.96e6, "280 to 540 h"),
        (2.0, 2.01, "2 s"),
    ],
)
def test_spans(low: float, high: float, shown: str) -> None:
    assert units.span(low, high) == shown


@given(st.floats(0.005, 1e7))
def test_a_duration_reads_back(seconds: float) -> None:
    parts = units.duration(seconds).split()
    scale = {"s": 1, "min": 60, "h": 3600}
    total = sum(
        float(number) * scale[unit] for number, unit in zip(parts[::2], parts[1::2], strict=True)
    )
    assert total == pytest.approx(seconds, rel=0.0086, abs=0.00501)
    assert " 60 s" not in f" {units.duration(seconds)}"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"), (0.4213, "0.42 s"), (0.996, "1.00 s"), (0.994, "0.99 s"), (0.004, "<0.01 s"),
        (38.06, "38.1 s"), (59.96, "1 min 00 s"),
        (125, "2 min 05 s"), (3599.6, "1 h 00 min"), (3780, "1 h 03 min"), (math.nan, "–"),
    ],
)  # fmt: skip
def test_durations(seconds: float, shown: str) -> None:
    assert units.duration(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (999_950, "1.00 MB"), (12_333_488, "12.3 MB"), (4e9, "4.00 GB")],
)
def test_sizes(count: float, shown: str) -> None:
    assert units.size(count) == shown


@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_smaller_and_larger_never_read_as_nothing(before: int, after: int) -> None:
    shown = units.smaller(before, after)
    if before == after:
        assert shown == "the same size"
    else:
        assert shown.endswith("smaller" if before > after else "larger")


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [(12.3, 3.9, "3.2× smaller"), (10, 10.4, "1.04× larger"), (1000, 1, "1,000× smaller"),
     (0, 5, "the same size")],
)  # fmt: skip
def test_ratios(before: float, after: float, shown: str) -> None:
    assert units.smaller(before, after) == shown


@given(st.floats(0, 1))
def test_a_percentage_of_less_than_all_is_not_100(share: float) -> None:
    assert (units.percent(share) == "100 %") == (share == 1)


def test_counts_with_their_noun() -> None:
    assert [units.counted(n, "file") for n in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]


def test_percentages() -> None:
    assert units.percent(0.93842) == "93.8 %"
    assert units.percent(0.99999) == ">99.9 %"
    assert units.deviation(0.0301) == "+3.0 %"
    assert units.deviation(-0.117) == "−11.7 %"
    assert units.deviation(0.0) == "±0.0 %"
    assert units.deviation(None) == "–"
    assert units.deviation(123.0) == "+12,300 %"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(16.0, "16"), (4.25, "4.25"), (0.5, "0.5"), (1000.0, "1,000"), (0.0, "0"), (math.inf, "∞")],
)
def test_trimmed(value: float, shown: str) -> None:
    assert units.trimmed(value) == shown
