"""Where the importance goes that an export measures: a file of the user's, or one of the result."""

import os
from dataclasses import dataclass
from pathlib import Path

from compress.checkpoint import disk, write_atomic
from compress.checkpoint.gguf_file import GGUF_FILE
from compress.checkpoint.regular import usable
from compress.errors import DataError, OutputError
from compress_exporters.exporter import AGAIN
from compress_exporters.gguf.imatrix import read_imatrix
from compress_exporters.gguf.imatrix_write import OLDER

OPTION = "--imatrix-out"
SUFFIXES = (".gguf", OLDER)


@dataclass(frozen=True, slots=True)
class ImatrixPlace:
    """path: of the file, absolute. inside: it lies in the folder of the result, and comes and goes
    with it. overwrite: an importance matrix that is there may be replaced."""

    path: Path
    inside: bool
    overwrite: bool


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
        _require_free(place)
    return place


def deliver(place: ImatrixPlace, folder: Path) -> None:
    """Move what was written into the result's folder to where it belongs, whole or not at all."""
    if place.inside:
        return
    staged = folder / place.path.name
    _require_free(place)  # again: minutes have passed
    with disk.refusing(f"read {staged}", AGAIN):
        data = staged.read_bytes()
        disk.unlink(staged)
    write_atomic(place.path, data, AGAIN)


def _require_place(asked: str, folder: Path) -> None:
    if not folder.is_dir():
        raise OutputError(
            f"{OPTION} is {asked}, and {folder} does not exist; make it first, or choose another"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{OPTION} is {asked}, and {folder} cannot be written to; choose another")


def _require_free(place: ImatrixPlace) -> None:
    if not os.path.lexists(place.path):
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
