"""Progress in Python: a bar for each stage by tqdm, which knows terminals and notebooks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from compress.events import Event, Progress

Asked = bool | Progress | None


class Bars:
    """Listens to the events of a run. A bar ends where another stage begins."""

    def __init__(self, tqdm: Any) -> None:
        self.tqdm, self.stage = tqdm, ""
        self.bar: Any = None

    def __call__(self, event: Event) -> None:
        if event.total == 0:
            self.close()
            self.tqdm.write(f"{event.stage}: {event.message}")
            return
        if self.bar is None or event.stage != self.stage or event.total != self.bar.total:
            self.close()
            # A resumed run begins in the middle of a stage.
            first = max(0, event.index - 1)
            self.bar = self.tqdm(total=event.total, desc=event.stage, initial=first)
            self.stage = event.stage
        self.bar.set_postfix_str(event.message or event.unit, refresh=False)
        self.bar.update(event.index - self.bar.n)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


@contextmanager
def listening(asked: Asked) -> Iterator[Progress | None]:
    """A listener: bars for True, none for False or None, and a function as it is."""
    if not isinstance(asked, bool):
        yield asked
        return
    if not asked:
        yield None
        return
    from tqdm.auto import tqdm

    bars = Bars(tqdm)
    try:
        yield bars
    finally:
        bars.close()
