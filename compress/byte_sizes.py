"""Sizes and counts as people write them: 5GB, 500MB, 2GiB; 3M, 300k."""

import re
from fractions import Fraction

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]i?B|B)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_MOST = 2**63 - 1024  # the largest float below 2^63, the bound of every file system
EXPECTED = "it takes a size such as 5GB, 500MB or 2GiB"


def byte_size(text: str) -> int | None:
    """Bytes, 1 or more; None for what is no size."""
    match = _SIZE.fullmatch(text.strip())
    # Exact: 4.02 million would be a float below 4,020,000.
    size = Fraction(match[1]) * _UNITS[(match[2] or "").lower()] if match else 0
    return int(size) if 1 <= size <= _MOST else None


_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kMG])")
_THOUSANDS = {"k": 10**3, "M": 10**6, "G": 10**9}


def plain_count(text: str) -> int | None:
    """The whole number that a count with a letter means; None for any other text."""
    match = _COUNT.fullmatch(text.strip())
    return round(float(match[1]) * _THOUSANDS[match[2]]) if match else None
