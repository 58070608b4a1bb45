"""Sizes as people write them, to the byte."""

import pytest

from compress.byte_sizes import byte_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4.02MB", 4_020_000),
        ("0.29 GB", 290_000_000),
        ("1.005kb", 1005),
        ("2GiB", 2 << 30),
        ("1.5B", 1),
        ("7", 7),
    ],
)
def test_a_size_is_that_of_its_decimals(text: str, size: int) -> None:
    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "0.5", "-1", "5 MB!", "1e3", "9999999TB"])
def test_what_is_no_size(text: str) -> None:
    assert byte_size(text) is None
