"""How much of the processor other programs took meanwhile, as /proc/stat counts it.

Where there is no /proc nothing is known, and nothing is said.
"""

import os
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
# user, nice, system, idle, iowait, irq, softirq, steal; what guests take is part of user.
_FIELDS, _IDLE = 8, (3, 4)


@dataclass(frozen=True, slots=True)
class ProcessorTicks:
    """Since the machine started, of all cores together: spent on anything, and gone by."""

    busy: int
    total: int
    cores: int


@dataclass(frozen=True, slots=True)
class ProcessorReading:
    """ticks: of the machine. own: processor seconds of this process and of its ended children."""

    ticks: ProcessorTicks
    own: float


@dataclass(frozen=True, slots=True)
class OtherWork:
    """share: of the machine's processor time that others took, in [0, 1]."""

    share: float
    cores: int

    @property
    def busy_cores(self) -> float:
        return self.share * self.cores


def parse_stat(text: str) -> ProcessorTicks | None:
    """Of the text of /proc/stat; None for what is none."""
    lines = [line.split() for line in text.splitlines() if line.startswith("cpu")]
    if not lines or lines[0][0] != "cpu" or not all(word.isdecimal() for word in lines[0][1:]):
        return None
    counts = [int(word) for word in lines[0][1 : 1 + _FIELDS]]
    if len(counts) < _FIELDS:
        return None
    idle = sum(counts[i] for i in _IDLE)
    return ProcessorTicks(sum(counts) - idle, sum(counts), len(lines) - 1)


def read_processor() -> ProcessorReading | None:
    """Now. None where the system does not say."""
    try:
        ticks = parse_stat(STAT.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if ticks is None else ProcessorReading(ticks, sum(os.times()[:4]))


def other_work(
    before: ProcessorReading | None, after: ProcessorReading | None, ticks_a_second: int = 100
) -> OtherWork | None:
    """Between two readings; None where one is missing or no tick went by.

    ticks_a_second: USER_HZ, which is 100 on every architecture of Linux that torch runs on.
    """
    if before is None or after is None:
        return None
    total = after.ticks.total - before.ticks.total
    if total <= 0:
        return None
    own = (after.own - before.own) * ticks_a_second
    share = (after.ticks.busy - before.ticks.busy - own) / total
    return OtherWork(min(1.0, max(0.0, share)), after.ticks.cores)


def share_since(before: ProcessorReading | None) -> float | None:
    """The share of others since a reading; None where it is not known."""
    found = other_work(before, read_processor())
    return None if found is None else found.share
