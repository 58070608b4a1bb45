"""Where the importance goes that an export measures: a file of the user's, or one of the result."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from compress.checkpoint import disk
from compress.checkpoint.gguf_file import GGUF_FILE
from compress.checkpoint.regular import usable
from compress.errors import DataError, OutputError
from compress_exporters.gguf.imatrix import read_imatrix

OPTION = "--imatrix-out"
OLDER = ".dat"
SUFFIXES = (".gguf", OLDER)
_THERE = "the export itself is there; look after the disk, then export again with --overwrite"


@dataclass(frozen=True, slots=True)
class ImatrixPlace:
    """path: of the file, absolute. inside: it lies in the folder of the result, and comes and goes
    with it. overwrite: an importance matrix that is there may be replaced."""

    path: Path
    inside: bool
    overwrite: bool

    @property
    def older(self) -> bool:
        """In the form of before GGUF."""
        return self.path.suffix == OLDER

    @property
    def temporary(self) -> Path:
        """Beside the file, so that its disk has it all before the result appears. Of a name that no
        small file of a checkpoint has that is carried over."""
        return self.path.with_name(self.path.name + disk.TEMPORARY)

    def written_at(self, folder: Path) -> Path:
        """Where it waits until the result appears. folder: that the result is made in."""
        return folder / self.path.name if self.inside else self.temporary


def imatrix_place(asked: str, out: str | Path | None, *, overwrite: bool) -> ImatrixPlace:
    """Looks and changes nothing. OutputError where no file can be, or one is in the way.

    out: folder of the result, where it has one.
    """
    path = usable(asked, OPTION, OutputError).resolve()
    if path.suffix not in SUFFIXES:
        raise OutputError(
            f"{OPTION} is {asked}; end its name in .gguf, or in .dat for the older form"
        )
    if path.name == GGUF_FILE:
        raise OutputError(f"{OPTION} is {asked}, the name of a model; choose another")
    folder = None if out is None else usable(out, "out", OutputError).resolve()
    place = ImatrixPlace(path, folder == path.parent, overwrite)
    if folder is not None and not place.inside and path.is_relative_to(folder):
        raise OutputError(
            f"{OPTION} is {asked}, which is the result's folder or below it; name a file in that"
            " folder or elsewhere"
        )
    if not place.inside:
        _require_place(asked, path.parent)
        require_free(place)
    return place


@contextmanager
def delivered(place: ImatrixPlace | None) -> Iterator[None]:
    """The block publishes the result; then what waits beside the file takes its place, by one
    rename, which needs no room. Where the block fails, the file stays what it was."""
    if place is None or place.inside:
        yield
        return
    try:
        yield
        with disk.refusing(f"rename {place.temporary} to {place.path}", _THERE):
            disk.rename(place.temporary, place.path)
            disk.fsync_path(place.path.parent)
    except (Exception, KeyboardInterrupt):
        with suppress(OSError):
            disk.unlink(place.temporary)
        raise


def _require_place(asked: str, folder: Path) -> None:
    if not folder.is_dir():
        raise OutputError(
            f"{OPTION} is {asked}, and {folder} does not exist; make it first, or choose another"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{OPTION} is {asked}, and {folder} cannot be written to; choose another")


def require_free(place: ImatrixPlace) -> None:
    """OutputError where something is in the way, elsewhere than in the result."""
    if place.inside or not os.path.lexists(place.path):
        return
    if place.path.is_dir():
        raise OutputError(f"{OPTION}: {place.path} is a folder; name a file in it")
    if not place.overwrite:
        raise OutputError(
            f"{OPTION}: {place.path} is there; choose another name or add --overwrite"
        )
    try:
        read_imatrix(place.path)
    except DataError as error:
        raise OutputError(
            f"{OPTION}: {place.path} is no importance matrix, and only those are replaced; choose"
            " another name"
        ) from error
