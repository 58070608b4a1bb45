"""What a user names: a path that can be, and a file that has an end.

Devices, sockets and pipes are no input. A recipe, a text or a task is read several times (planned,
hashed, read, and again by --resume), which a pipe is not; /dev/zero never ends; and to open a pipe
that nobody writes to waits for ever.
"""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from compress.errors import CompressError

_NAME, _PATH = 255, 4095  # bytes that Linux and macOS (names) take
_LINE = 256 << 20
# What the system lacks at the moment: it says nothing about a file.
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_KINDS = (
    (stat.S_ISDIR, errno.EISDIR, "it is a folder"),
    (
        stat.S_ISFIFO,
        errno.ESPIPE,
        "it is a pipe; write what it gives to a file",
    ),
    (stat.S_ISSOCK, errno.ENXIO, "it is a socket; name a file"),
    (stat.S_ISCHR, errno.ENODEV, "it is a device; name a file"),
    (stat.S_ISBLK, errno.ENODEV, "it is a device; name a file"),
)


def usable(path: str | Path, what: str, error: type[CompressError]) -> Path:
    """The path, which need not exist; `error` for one that nothing can be at, or that texts such as
    reports and graphs cannot hold.

    what: names it in the message.
    """
    text = os.fspath(path)
    why = _why_not_usable(text)
    if why is not None:
        shown = text if len(text) <= 100 else f"{text[:60]}...{text[-30:]}"
        raise error(f"{what} is {shown!r}: {why}")
    return Path(text)


def _why_not_usable(text: str) -> str | None:
    if not text.strip():
        return "a path is needed"
    if "\0" in text:
        return "no path has a zero byte"
    if not _is_text(text):
        return "its name is not UTF-8; rename it"
    raw = text.encode()
    longest = max(map(len, raw.split(b"/")))
    if longest > _NAME:
        return f"a name in it has {longest} bytes; {_NAME} are possible"
    if len(raw) > _PATH:
        return f"it has {len(raw)} bytes; {_PATH} are possible"
    return _why_not_reachable(text)


def _why_not_reachable(text: str) -> str | None:
    """Also of where links lead, and of the current folder."""
    try:
        os.stat(text)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "its links lead in a circle; mend them"
    try:
        full = os.path.realpath(text)
    except OSError as error:  # the current folder was removed
        return f"the current folder cannot be found ({error.strerror})"
    if not _is_text(full):
        return f"it leads to {full!a}, whose name is not UTF-8; rename that"
    return None


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def open_regular(path: Path) -> BinaryIO:
    """A regular file, opened for reading. OSError, with a reason to print, for anything else."""
    _require_regular(path, os.stat(path).st_mode)
    # Where a pipe takes its place now, O_NONBLOCK keeps it from waiting for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _require_regular(path, os.fstat(fd).st_mode)
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def _require_regular(path: Path, mode: int) -> None:
    for is_kind, number, reason in _KINDS:
        if is_kind(mode):
            raise OSError(number, reason, str(path))


def require_regular(path: Path) -> None:
    """OSError, with a reason to print, for anything but a regular file."""
    _require_regular(path, os.stat(path).st_mode)


def read_regular(path: Path, most: int) -> bytes:
    """The whole of a file of at most `most` bytes; OSError for others."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return data


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file; OSError for one so long that it is no line."""
    with open_regular(path) as file:
        while line := file.readline(_LINE):
            if len(line) == _LINE:
                raise OSError(errno.EFBIG, f"a line has {_LINE} bytes or more", str(path))
            yield line
