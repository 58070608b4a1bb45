"""Puts an artifact into the folder of its checkpoint, beside the weights: whole, or not at all.

The export works in GRAPH.partial, a folder inside the checkpoint's. A graph can only be opened
beside its weights. So for the proof the graph and its other files are moved there, the graph under
a name that no reader takes for a graph. One rename then gives it its real name, or puts it in the
place of an earlier graph of ours, which keeps its own files until then. What a killed export leaves
is removed by the next one. Nothing else in the folder is touched, not even what others put into
GRAPH.partial.
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
    """Where the artifact goes, and where the export works.

    folder: the checkpoint's, with symbolic links resolved. how: names of the target's files.
    overwrite: an earlier graph of ours may be replaced.
    """

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
        """Names of the files that the existing graph reads: none without a graph, and None for a
        graph of another tool."""
        return self.how.reads(self.graph) if os.path.lexists(self.graph) else frozenset()

    def unread(self) -> list[Path]:
        """Files that have our names and that no graph reads: a killed export left them, or they
        are not ours."""
        read = self.read()
        # It is not known what a graph of another tool reads: it may be any of these.
        others = () if read is None else (x for x in self.how.others if x not in read)
        names = (self.how.unproved, *others)
        return [self.folder / name for name in names if os.path.lexists(self.folder / name)]

    def strange(self) -> list[Path]:
        """What an export of ours did not make: a file in place of GRAPH.partial, or in it."""
        if not os.path.lexists(self.work):
            return []
        if self.work.is_symlink() or not self.work.is_dir():
            return [self.work]
        with disk.refusing(f"look into {self.work}", AGAIN):
            there = sorted(self.work.iterdir())
        # Packages that write graphs make folders of their own in it, called .GRAPH.something.
        return [x for x in there if not x.name.removeprefix(".").startswith(self.how.graph)]


def prepare(how: InPlace, checkpoint: Checkpoint, needed: int, *, overwrite: bool) -> InPlaceFolder:
    """Check the place without changing it, and return it.

    Raises OutputError for weights that readers of graphs refuse (links), for files in the way, for
    a process that works there, and where the disk has no room for `needed` bytes.
    """
    place = InPlaceFolder(checkpoint.path.resolve(), how, overwrite)
    require_idle(place.work)
    _require_plain(place.folder, checkpoint.files)
    if not os.access(place.folder, os.W_OK | os.X_OK):
        raise OutputError(f"{place.folder} cannot be written to; {ELSEWHERE}")
    _require_free(place)
    require_room(place.folder, needed)
    return place


def added(place: InPlaceFolder, work: Callable[[], tuple[T, bytes]]) -> T:
    """Make an artifact by `work`, give it its real name, and return the result of `work`.

    `work` fills place.work, calls `move_into_place`, proves the artifact and returns its result and
    the bytes of its report. Where it fails, nothing is left.
    """
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
            _require_free(place)  # again: a proof takes minutes, and files may have appeared
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
    """Move files from place.work beside the weights; the graph gets its name for the proof."""
    with disk.refusing(f"write into {place.folder}", AGAIN):
        for name in files:
            disk.fsync_path(place.work / name)
            target = place.how.unproved if name == place.how.graph else name
            disk.rename(place.work / name, place.folder / target)
        disk.fsync_path(place.folder)


def _finish(place: InPlaceFolder, earlier: frozenset[str]) -> None:
    """Put the report beside the graph, and remove files that only the earlier graph read.

    earlier: names of the files that it read.
    """
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
    """Remove what this export made, or what a killed one left."""
    with disk.refusing(f"clear {place.work}", AGAIN):
        for path in (*place.unread(), *place.work.iterdir()):
            disk.remove_tree(path)


def _require_plain(folder: Path, files: Iterable[str]) -> None:
    """OutputError for a file that is a link or has hard links."""
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
    """OutputError for files under our names that the export may not replace."""
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
    orphan = [] if there or not os.path.lexists(place.report) else [place.report]
    # Beside GRAPH.partial, files that no graph reads are what a killed export left, or our own.
    in_the_way = orphan if place.work.is_dir() else [*place.unread(), *orphan]
    if in_the_way:
        names = ", ".join(path.name for path in in_the_way)
        raise OutputError(
            f"{place.folder} has {names} without the graph to it, and the export would write files"
            f" of that name; move them away, or {ELSEWHERE}"
        )
