"""An artifact beside the weights of its checkpoint, in one folder: it is whole or not there.

Work goes on in GRAPH.partial, a folder in the checkpoint's. The graph can only be opened beside the
weights, so for its proof it lies there under a name that nobody takes for a graph's, with its other
files. By one rename it is then there, or in the place of an earlier one of ours, whose files are
its own until then. What a kill leaves is taken away by the next export; nothing else in the folder
is ever touched, also not what others put into GRAPH.partial.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from compress.checkpoint import Checkpoint, disk, locked, require_idle, write_atomic
from compress.checkpoint.output.publishing import require_room
from compress.errors import CompressError, OutputError
from compress_exporters.exporter import AGAIN, InPlace

T = TypeVar("T")
ELSEWHERE = "export with -o FOLDER instead"


@dataclass(frozen=True, slots=True)
class InPlaceFolder:
    """folder: the checkpoint's, without links. overwrite: an earlier graph of ours may go."""

    folder: Path
    how: InPlace
    overwrite: bool

    @property
    def graph(self) -> Path:
        return self.folder / self.how.graph

    @property
    def work(self) -> Path:
        return self.folder / f"{self.how.graph}.partial"

    @property
    def report(self) -> Path:
        return self.folder / f"{self.how.graph}.json"

    def read(self) -> frozenset[str] | None:
        """Names that the graph reads that is there; None for another tool's."""
        return self.how.reads(self.graph) if os.path.lexists(self.graph) else frozenset()

    def unread(self) -> list[Path]:
        """What is there of our names and belongs to no graph: left by a kill, or not ours."""
        read = self.read()
        # Of another tool's graph nobody knows what it reads.
        others = () if read is None else (x for x in self.how.others if x not in read)
        names = (self.how.unproved, *others)
        return [self.folder / name for name in names if os.path.lexists(self.folder / name)]

    def strange(self) -> list[Path]:
        """What is there instead of our work, or in it, and was not made by it."""
        if not os.path.lexists(self.work):
            return []
        if self.work.is_symlink() or not self.work.is_dir():
            return [self.work]
        with disk.refusing(f"look into {self.work}", AGAIN):
            there = sorted(self.work.iterdir())
        # Packages that write have folders of their own there, .NAME.something.
        return [x for x in there if not x.name.removeprefix(".").startswith(self.how.graph)]


def prepare(how: InPlace, checkpoint: Checkpoint, needed: int, *, overwrite: bool) -> InPlaceFolder:
    """The place, looked at and not changed. OutputError for weights that no reader of graphs takes
    from there, for what is in the way, for a process that works there, and unless the disk has room
    for `needed` bytes."""
    place = InPlaceFolder(checkpoint.path.resolve(), how, overwrite)
    require_idle(place.work)
    _require_plain(place.folder, checkpoint.files)
    if not os.access(place.folder, os.W_OK | os.X_OK):
        raise OutputError(f"{place.folder} cannot be written to; {ELSEWHERE}")
    _require_free(place)
    require_room(place.folder, needed)
    return place


def added(place: InPlaceFolder, work: Callable[[], tuple[T, bytes]]) -> T:
    """What `work` returns with the bytes of its report, once the artifact is there: it fills
    place.work, calls `move_into_place`, and proves what is there then. Nothing is left of one that
    fails."""
    with disk.refusing(f"make {place.work}", AGAIN):
        disk.require_handles(place.folder)
        if not place.work.is_dir():
            disk.mkdir(place.work)
    with disk.spare_handle(), locked(place.work):
        try:
            _require_free(place)  # again: another process may have ended since `prepare`
            _clear(place)
            result, report = work()
            write_atomic(place.work / place.report.name, report)
            _require_free(place)  # and what came meanwhile, as a proof takes minutes
            earlier = place.read() or frozenset()
            with disk.refusing(f"write {place.graph}", AGAIN):
                disk.rename(place.folder / place.how.unproved, place.graph)
        except (Exception, KeyboardInterrupt):
            disk.use_spare_handle()
            with suppress(OSError, CompressError):
                _clear(place)
                disk.rmdir(place.work)
            raise
        _finish(place, earlier)
    return result


def move_into_place(place: InPlaceFolder, files: Iterable[str]) -> None:
    """Moves files from place.work to where they are read, the graph under its name for a proof."""
    with disk.refusing(f"write into {place.folder}", AGAIN):
        for name in files:
            disk.fsync_path(place.work / name)
            target = place.how.unproved if name == place.how.graph else name
            disk.rename(place.work / name, place.folder / target)
        disk.fsync_path(place.folder)


def _finish(place: InPlaceFolder, earlier: frozenset[str]) -> None:
    """Puts the report to the graph, and takes away what the one before it read."""
    with disk.refusing(f"finish {place.graph}, which is whole", AGAIN):
        disk.fsync_path(place.folder)
        kept = place.read() or frozenset()
        for name in sorted(earlier.intersection(place.how.others) - kept):
            with suppress(FileNotFoundError):
                disk.unlink(place.folder / name)
        disk.rename(place.work / place.report.name, place.report)
        disk.rmdir(place.work)
        disk.fsync_path(place.folder)


def _clear(place: InPlaceFolder) -> None:
    """Takes away what work has made, or work before it that was killed."""
    with disk.refusing(f"clear {place.work}", AGAIN):
        for path in (*place.unread(), *place.work.iterdir()):
            disk.remove_tree(path)


def _require_plain(folder: Path, files: Iterable[str]) -> None:
    for name in files:
        path = folder / name
        if path.resolve() != path:
            raise OutputError(
                f"{path} is a link, as in a hub's cache, and readers of graphs follow none;"
                f" {ELSEWHERE}"
            )
        if path.stat().st_nlink > 1:
            raise OutputError(
                f"{path} has several names (hard links), and readers of graphs refuse such files;"
                f" {ELSEWHERE}"
            )


def _require_free(place: InPlaceFolder) -> None:
    """OutputError for what is there under our names and may not go."""
    if strange := place.strange():
        names = ", ".join(str(path.relative_to(place.folder)) for path in strange)
        raise OutputError(
            f"{place.folder} has {names}, where the export would do its work; move it away, or"
            f" {ELSEWHERE}"
        )
    there = os.path.lexists(place.graph)
    if there and place.read() is None:
        raise OutputError(
            f"{place.graph} is not of compress-model, and only its graphs are replaced; move it"
            f" away, or {ELSEWHERE}"
        )
    if there and not place.overwrite:
        raise OutputError(f"{place.graph} is there; add --overwrite to replace it, or remove it")
    alone = [] if there or not os.path.lexists(place.report) else [place.report]
    left = alone if place.work.is_dir() else [*place.unread(), *alone]
    if left:
        names = ", ".join(path.name for path in left)
        raise OutputError(
            f"{place.folder} has {names} without the graph to it, and the export would write files"
            f" of that name; move them away, or {ELSEWHERE}"
        )
