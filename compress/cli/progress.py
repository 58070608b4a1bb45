"""Progress on stderr: one rewritten line on a terminal, one line a step elsewhere."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TextIO

from compress.report.columns import fitted
from compress.report.units import duration

if TYPE_CHECKING:
    from compress.events import Event

_BAR = 20
# A first step does what is done once (memory, tables, a model built): shorter than this, its time
# says nothing of the next.
_LONG_SECONDS = 30


@dataclass(slots=True)
class ProgressLine:
    """Listens to the events of a run. terminal: whether a line of `stream` can be rewritten."""

    stream: TextIO
    terminal: bool
    clock: Callable[[], float] = time.monotonic
    _last: float = 0.0
    _stage: str = ""
    _steps: dict[str, list[float]] = field(default_factory=dict)
    _open: bool = False

    def __post_init__(self) -> None:
        self._last = self.clock()

    def __call__(self, event: "Event") -> None:
        if event.stage != self._stage:
            self.close()
            self._stage, self._steps = event.stage, {}
        now = self.clock()
        if event.total == 0:
            self._note(event, now)
            return
        # An event that does not say how long it took ends the time since the one before.
        event = replace(event, seconds=event.seconds or now - self._last)
        self._last = now
        self._steps.setdefault(_kind(event), []).append(event.seconds)
        self._write(self._bar(event) if self.terminal else self._plain(event))
        if event.index >= event.total:
            self.close()

    def _note(self, event: "Event", now: float) -> None:
        """Whole lines that nothing rewrites or cuts."""
        self.close()
        self._last = now
        line = f"{event.stage}: {event.message}"
        self.stream.write((fitted(line, _columns()) if self.terminal else line) + "\n")
        self.stream.flush()

    def close(self) -> None:
        """End a rewritten line, so that what follows starts on its own."""
        if self._open:
            self.stream.write("\n")
            self.stream.flush()
            self._open = False

    def remaining(self, event: "Event") -> float | None:
        """Seconds left in this stage, by the mean of the newest ten steps of the event's kind; None
        where too few are known.

        A resumed run does not repeat what is finished, so only steps seen here count.
        """
        first, *others = self._steps[_kind(event)]
        newest = others[-10:] or [first]
        more_come = event.unit[-1:].isdecimal()
        if not others and (first < _LONG_SECONDS or not more_come):
            return None
        return (event.total - event.index) * sum(newest) / len(newest)

    def _left(self, event: "Event") -> str:
        left = self.remaining(event) if event.index < event.total else None
        return "" if left is None else f", {duration(left)} left"

    def _plain(self, event: "Event") -> str:
        step = f"{event.stage}: {event.unit} ({event.index}/{event.total})"
        message = f"; {event.message}" if event.message else ""
        return f"{step}, {duration(event.seconds)}{self._left(event)}{message}"

    def _bar(self, event: "Event") -> str:
        done = _BAR * event.index // max(event.total, 1)
        bar = "#" * done + "." * (_BAR - done)
        left = self._left(event) if event.index < event.total else ", done"
        text = f"{event.stage} [{bar}] {event.index}/{event.total} {event.unit}{left}"
        return text + (f"; {event.message}" if event.message else "")

    def _write(self, text: str) -> None:
        if self.terminal:
            width = max(20, _columns() - 1)
            self.stream.write("\r\x1b[K" + text[:width])
            self._open = True
        else:
            self.stream.write(text + "\n")
        self.stream.flush()


def _columns() -> int:
    return shutil.get_terminal_size().columns


def _kind(event: "Event") -> str:
    """Steps of one kind take about as long: blocks, not the tensors in front of them."""
    return event.unit.partition(" ")[0]


@contextmanager
def watched() -> Iterator[ProgressLine]:
    """A listener on stderr whose line is ended however the work ends."""
    # A dumb terminal has no escape that clears a line. Colours are never written.
    line = ProgressLine(sys.stderr, sys.stderr.isatty() and os.environ.get("TERM") != "dumb")
    try:
        yield line
    finally:
        line.close()
