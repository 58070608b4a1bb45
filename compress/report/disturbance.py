"""How much of the machine other programs took during a measurement, and the line that says so."""

from collections.abc import Iterable

from compress.report.schema import StageRecord

# The smallest share of the cores that is reported. It lies well above noise: two readings of
# /proc/stat half a second apart differ by 1 % on two cores, because it counts in ticks of 10 ms.
# A program that computes takes a whole core. Of more than 10 cores that is less than this share:
# it is not reported there, and costs a tenth of the speed at most.
DISTURBING = 0.1


def disturbance(share: float | None) -> str | None:
    """The line for a reader; None where the share is too small to matter, or unknown.

    share: of all cores, from 0 to 1, as other programs took it.
    """
    if share is None or share < DISTURBING:
        return None
    return f"other work took {100 * share:.0f} % of the cores meanwhile; a quiet machine is faster"


def taken(stages: Iterable[StageRecord]) -> float | None:
    """Share of the cores that other programs took over all stages; None where none is known."""
    return averaged([(stage.others, stage.seconds) for stage in stages])


def averaged(parts: Iterable[tuple[float | None, float]]) -> float | None:
    """Mean of the shares of (share, seconds), weighted by seconds; None where no share is known."""
    known = [(share, seconds) for share, seconds in parts if share is not None and seconds > 0]
    total = sum(seconds for _, seconds in known)
    return sum(share * seconds for share, seconds in known) / total if known else None
