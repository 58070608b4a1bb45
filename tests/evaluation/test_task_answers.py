"""What an output answers, and what the numbers of a task are."""

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.evaluation.tasks.answers import answer_of, is_number, is_right
from compress.evaluation.tasks.numbers import TaskOutcome, agreement, difference, number
from compress.expressions import expression

OUTPUTS = [
    ("so 16 - 3 = 13. She makes $18.", "18"),
    ("#### 1,234,567", "1234567"),
    ("it is 5,6", "6"),
    ("from 3-5", "5"),
    ("minus -7.50 dollars", "-7.50"),
    ("-$8", "-8"),
    ("half is .5", "0.5"),
    ("12,3456", "3456"),
    ("none at all", None),
    ("", None),
]


@pytest.mark.parametrize(("output", "value"), OUTPUTS, ids=range(len(OUTPUTS)))
def test_the_last_number(output: str, value: str | None) -> None:
    assert answer_of(output, None, True) == (None if value is None else Decimal(value))


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3), st.integers(0, 10**12))
def test_numbers_are_found_as_they_are_written(value: Decimal, count: int) -> None:
    assert answer_of(f"The answer is {value:f}.", None, True) == value
    assert answer_of(f"so {count:,} of them", None, True) == count
    assert is_number(f"{count:,}")
    assert is_right(Decimal(count), [f"${count:,}.00"])


def test_extraction_takes_the_last_match() -> None:
    text = "The answer is 4. No: the answer is  nine . Bye 7"
    assert answer_of(text, expression(r"answer is ([^.]*)", ValueError), False) == "nine"
    assert answer_of(text, expression(r"answer is ([^.]*)", ValueError), True) is None
    assert answer_of(text, expression(r"\d+", ValueError), False) == "7"
    assert answer_of(text, expression(r"answer was", ValueError), False) is None
    assert answer_of(text, expression(r"Bye (\w+)|(never)", ValueError), False) == "7"
    assert answer_of("never", expression(r"Bye (\w+)|never", ValueError), False) is None
    assert answer_of("  a b \n", None, False) == "a b"


def test_what_is_right() -> None:
    assert is_right(Decimal("18.0"), ["17", "$18"])
    assert not is_right(Decimal("18.5"), ["18"])
    assert is_right("Paris", ["London", " Paris "])
    assert not is_right("paris", ["Paris"])
    assert not is_right(None, [""])
    assert is_right("", [""])
    assert [is_number(text) for text in ("18", " -4.5 ", "$1,000", "18 apples", "", "1 2")] == [
        *(True, True, True),
        *(False, False, False),
    ]


def test_shares_and_their_errors() -> None:
    """The standard error of a share p of n items: sqrt(p (1 - p) / (n - 1))."""
    values = (1.0,) * 30 + (0.0,) * 10
    found = number("acc", values)
    assert found.value == 0.75
    assert found.error == pytest.approx(math.sqrt(0.75 * 0.25 / 39))
    assert number("acc", (1.0,)).error is None


def test_differences_are_of_items() -> None:
    before, after = (1.0,) * 30 + (0.0,) * 10, (1.0,) * 29 + (0.0,) * 11
    found = difference("acc", before, after)
    assert found.value == pytest.approx(-0.025)
    assert found.error == pytest.approx(math.sqrt(0.025 * 0.975 / 39))
    assert found.error is not None
    assert found.error < number("acc", before).error
    assert difference("acc", before, before) == type(found)(0.0, 0.0)


def test_perplexity_is_of_continuations() -> None:
    scores = (-1.0, -2.0, -6.0)
    found = number("perplexity", scores)
    assert found.value == pytest.approx(math.exp(3.0))
    # d exp(-m) = -exp(-m) dm, and the items vary by sqrt(7).
    assert found.error == pytest.approx(math.exp(3.0) * math.sqrt(7 / 3))
    moved = difference("perplexity", scores, tuple(s - 1e-6 for s in scores))
    assert moved.value == pytest.approx(math.exp(3.0) * 1e-6, rel=1e-3)
    assert moved.error == pytest.approx(moved.value * math.sqrt(7 / 3), rel=1e-2)
    endless = number("perplexity", (-1e6, -2e6))
    assert (endless.value, endless.error) == (math.inf, None)


def test_agreement_is_of_answers() -> None:
    a, b = (TaskOutcome({}, answers) for answers in ((0, 1, None, "x"), (0, 2, None, "y")))
    assert agreement(a, b) == 0.5
