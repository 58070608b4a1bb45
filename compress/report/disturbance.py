"""When other programs disturbed what was measured, and how that is said."""

from collections.abc import Iterable

from compress.report.schema import StageRecord

# Share of the cores from which on it is said. Two readings of /proc/stat half a second apart differ
# by 1 % on two cores for its ticks of 10 ms alone; a program that computes takes a whole core.
DISTURBING = 0.1


def disturbance(share: float | None) -> str | None:
    """The line about it; None where too little was taken to matter, or nothing is known."""
    if share is None or share < DISTURBING:
        return None
    return f"other work took {100 * share:.0f} % of the cores meanwhile; a quiet machine is faster"


def taken(stages: Iterable[StageRecord]) -> float | None:
    """Share of the cores that others took over all stages."""
    return averaged([(stage.others, stage.seconds) for stage in stages])


def averaged(parts: Iterable[tuple[float | None, float]]) -> float | None:
    """Of (share, seconds) each counted by its seconds; None where no share is known."""
    known = [(share, seconds) for share, seconds in parts if share is not None and seconds > 0]
    seconds = sum(own for _, own in known)
    return sum(share * own for share, own in known) / seconds if known else None
