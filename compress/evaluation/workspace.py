"""Where an evaluation works, and who is told."""

from dataclasses import dataclass
from pathlib import Path

from compress.events import Progress, silent
from compress.usercache.cache import UserCache


@dataclass(frozen=True, slots=True)
class Workspace:
    """folder: for temporary files; it must exist, but for `quality.measure`, which makes it and
    removes it. device: that the models run on. progress: hears of every block. label: what
    progress and files call the model that is measured. kept: where text of the source's own and its
    final states lie; None to keep none."""

    folder: Path
    device: str = "cpu"
    progress: Progress = silent
    label: str = "result"
    kept: UserCache | None = None
