"""What a long run tells whoever watches it."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One step of the work is done.

    stage: what is going on ("calibrate", "quantize", "evaluate source", ...).
    unit: what was just finished ("block 3"), index of total; seconds it took, 0 where the listener
        may take the time since the event before.
    A total of 0 is a note: nothing is finished, `message` says what begins.
    """

    stage: str
    unit: str
    index: int
    total: int
    seconds: float
    message: str = ""


Progress = Callable[[Event], None]


def note(stage: str, message: str) -> Event:
    """A line on what begins."""
    return Event(stage, "", 0, 0, 0.0, message)


def by_tenths(progress: Progress, stage: str, unit: str) -> Callable[[int, int], None]:
    """A counter (done, total) that becomes ten events or so, each with the time of its steps."""
    last = time.perf_counter()

    def count(done: int, total: int) -> None:
        nonlocal last
        if done < total and (10 * done) // total == (10 * (done - 1)) // total:
            return
        now = time.perf_counter()
        tenth = done if total < 10 else 10 * done // total
        progress(Event(stage, unit, tenth, min(10, total), now - last))
        last = now

    return count


def silent(event: Event) -> None:
    """The default listener."""
