"""The folder of a report that a command writes beside nothing else."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from compress.checkpoint import disk
from compress.checkpoint.output.folder import require_no_run
from compress.checkpoint.regular import usable
from compress.errors import OutputError

_FILES = "report.*"


@contextmanager
def report_folder(out: str | Path | None) -> Iterator[Path | None]:
    """A new or empty folder for report.json and report.html; None where none is asked for.

    It is made before the work, which may take hours, and goes again where the work fails. Raises
    OutputError where it cannot be used: also where a run makes its result of that name, which would
    find the report in its way at its end.
    """
    if out is None:
        yield None
        return
    folder = usable(out, "out", OutputError)
    require_no_run(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} is not an empty folder; choose another one for the report")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        _make(folder)
        yield folder
    except BaseException:  # Ctrl-C too
        with suppress(OSError):
            _take_away(folder, made)
        raise


def _make(folder: Path) -> None:
    with disk.refusing(f"make {folder}", "choose another folder for the report"):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{folder} cannot be written to; choose another folder for the report")


def _take_away(folder: Path, made: list[Path]) -> None:
    """Our files, and the folders that were not there before; those of others stay."""
    for file in folder.glob(_FILES):
        disk.unlink(file)
    for path in made:
        if path.exists():
            disk.rmdir(path)
