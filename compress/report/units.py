"""Numbers as people read them. Units are decimal: 1 MB is a million bytes."""

import math

MISSING = "–"  # an en dash, which screen readers pass over
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_SPANS = (("h", 3600.0), ("min", 60.0))
_COUNT_UNITS = ("", " k", " M", " B", " T")


def significant(value: float, digits: int = 3) -> str:
    """`value` with that many significant digits and never an exponent from 1e-5 to 1e9."""
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "−∞"}.get(value, "not a number")
    if value == 0:
        return "0"
    if not 1e-5 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    # The exponent after rounding: 9.996 has three digits as 10.0.
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def size(count: float) -> str:
    """Bytes: "3.94 MB"."""
    return _scaled(count, _BYTE_UNITS, " ")


def two_sizes(first: int, second: int) -> tuple[str, str]:
    """Two numbers of bytes that are held against each other: in full where they would read alike
    and are not."""
    shown = size(first), size(second)
    if first != second and shown[0] == shown[1]:
        return f"{whole(first)} bytes", f"{whole(second)} bytes"
    return shown


def count(number: float) -> str:
    """Parameters: "6.03 M"."""
    return _scaled(number, _COUNT_UNITS, "")


def trimmed(value: float, digits: int = 3) -> str:
    """Like `significant`, without zeros at the end: "16", "4.25", "0.5"."""
    shown = significant(value, digits)
    whole_part, dot, places = shown.partition(".")
    if not dot or not places.isdigit():
        return shown
    places = places.rstrip("0")
    return f"{whole_part}.{places}" if places else whole_part


def _scaled(value: float, units: tuple[str, ...], gap: str) -> str:
    step = 0
    while step < len(units) - 1 and float(f"{abs(value) / 1000**step:.2e}") >= 1000:
        step += 1
    scaled = value / 1000**step
    shown = f"{scaled:,.0f}" if step == 0 else significant(scaled)
    return f"{shown}{gap}{units[step]}"


def whole(number: int) -> str:
    """Counts in full: "65,536"."""
    return f"{number:,}"


def counted(number: int, noun: str) -> str:
    """ "1 file", "2 files", "65,536 tokens"."""
    return f"{whole(number)} {noun}{'s'[: number != 1]}"


def duration(seconds: float) -> str:
    """ "0.42 s", "38.1 s", "2 min 05 s", "1 h 03 min"."""
    if not math.isfinite(seconds):
        return MISSING
    if 0 < seconds < 1:
        return f"{seconds:.2f} s" if seconds >= 0.005 else "<0.01 s"
    if float(f"{seconds:.2e}") < 60:
        return f"{significant(seconds)} s"
    total = round(seconds)
    minutes, rest = divmod(total, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def span(low: float, high: float) -> str:
    """Between two numbers of seconds: "2.1 to 3.4 h". No more than two digits each, so that nobody
    reads precision into an estimate."""
    unit, seconds = next(((name, each) for name, each in _SPANS if high >= 1.5 * each), ("s", 1.0))
    first, last = (_two_digits(value / seconds) for value in (low, high))
    return f"{first} {unit}" if first == last else f"{first} to {last} {unit}"


def _two_digits(value: float) -> str:
    rounded = float(f"{value:.1e}")
    return f"{rounded:,.0f}" if rounded >= 10 else trimmed(rounded, 2)


def percent(share: float) -> str:
    """A share in [0, 1]: "91.2 %". Only a true 1 is "100 %"."""
    if not math.isfinite(share):
        return MISSING
    tenths = round(share * 1000)
    if tenths == 1000 and share != 1:
        return ">99.9 %" if share < 1 else "100.0 %"
    return "100 %" if share == 1 else f"{tenths / 10:.1f} %"


def deviation(share: float | None) -> str:
    """A signed change: "+3.0 %", "−12 %"; a dash where there is none."""
    if share is None or not math.isfinite(share):
        return MISSING
    sign = "+" if share > 0 else "−" if share < 0 else "±"
    points = abs(share) * 100
    if points >= 1000:
        return f"{sign}{points:,.0f} %"
    return f"{sign}{points:.1f} %"


def smaller(before: float, after: float) -> str:
    """ "3.2× smaller", "1.1× larger" or "the same size"."""
    if before <= 0 or after <= 0 or before == after:
        return "the same size"
    ratio, word = (before / after, "smaller") if before > after else (after / before, "larger")
    return f"{times(ratio)} {word}"


def times(ratio: float) -> str:
    """A factor: "3.2×"; two decimals below 1.1, where one would hide it."""
    shown = (
        f"{ratio:.2f}" if ratio < 1.095 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:,.0f}"
    )
    return f"{shown}×"
