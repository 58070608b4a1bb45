"""Progress on stderr: one rewritten line on a terminal, one line a step elsewhere."""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TextIO

from compress.report.units import duration

if TYPE_CHECKING:
    from compress.pipeline.events import Event

_BAR = 20


@dataclass(slots=True)
class ProgressLine:
    """Listens to the events of a run. terminal: whether a line of `stream` can be rewritten."""

    stream: TextIO
    terminal: bool
    clock: Callable[[], float] = time.monotonic
    _last: float = 0.0
    _stage: str = ""
    _steps: list[float] = field(default_factory=list)
    _open: bool = False

    def __post_init__(self) -> None:
        self._last = self.clock()

    def __call__(self, event: "Event") -> None:
        if event.stage != self._stage:
            self.close()
            self._stage, self._steps = event.stage, []
        now = self.clock()
        if event.total == 0:
            self._note(event, now)
            return
        # An event that does not say how long it took ends the time since the one before.
        event = replace(event, seconds=event.seconds or now - self._last)
        self._last = now
        self._steps.append(event.seconds)
        self._write(self._bar(event) if self.terminal else self._plain(event))
        if event.index >= event.total:
            self.close()

    def _note(self, event: "Event", now: float) -> None:
        """A whole line that nothing rewrites or cuts."""
        self.close()
        self._last = now
        self.stream.write(f"{event.stage}: {event.message}\n")
        self.stream.flush()

    def close(self) -> None:
        """End a rewritten line, so that what follows starts on its own."""
        if self._open:
            self.stream.write("\n")
            self.stream.flush()
            self._open = False

    def remaining(self, event: "Event") -> float:
        """Seconds left in this stage, by the mean of the newest ten steps.

        A resumed run does not repeat what is finished, so only steps seen here count; the newest,
        because the first ones may differ in kind (embeddings before blocks).
        """
        newest = self._steps[-10:]
        return (event.total - event.index) * sum(newest) / len(newest)

    def _plain(self, event: "Event") -> str:
        parts = [f"{event.stage}: {event.unit} ({event.index}/{event.total})"]
        parts.append(duration(event.seconds))
        if event.index < event.total:
            parts.append(f"{duration(self.remaining(event))} left")
        return ", ".join(parts) + (f"; {event.message}" if event.message else "")

    def _bar(self, event: "Event") -> str:
        done = _BAR * event.index // max(event.total, 1)
        bar = "#" * done + "." * (_BAR - done)
        left = f"{duration(self.remaining(event))} left" if event.index < event.total else "done"
        text = f"{event.stage} [{bar}] {event.index}/{event.total} {event.unit}, {left}"
        return text + (f"; {event.message}" if event.message else "")

    def _write(self, text: str) -> None:
        if self.terminal:
            width = max(20, shutil.get_terminal_size().columns - 1)
            self.stream.write("\r\x1b[K" + text[:width])
            self._open = True
        else:
            self.stream.write(text + "\n")
        self.stream.flush()


@contextmanager
def watched() -> Iterator[ProgressLine]:
    """A listener on stderr whose line is ended however the work ends."""
    line = ProgressLine(sys.stderr, sys.stderr.isatty())
    try:
        yield line
    finally:
        line.close()
