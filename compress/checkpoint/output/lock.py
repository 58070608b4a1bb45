"""Which process works in a folder: a lock that goes with the process, however it ends.

It is the system's lock on the folder itself (flock), so it stays when the folder is renamed, and
no file says that a process lives which does not.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from compress.checkpoint import disk
from compress.errors import OutputError

# `require_idle` of another command has a folder for some microseconds.
_TRIES, _PAUSE = 6, 0.01
_NO_LOCKS = "choose a folder on a disk that has locks (flock)"
# Folders (device, inode) that a caller holds for what it calls; another thread has none of them.
_lent: ContextVar[frozenset[tuple[int, int]]] = ContextVar("lent", default=frozenset())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for this process; OutputError when another one has it, or had it just now."""
    fd = _opened(folder)
    try:
        if _is_lent(fd):
            yield
            return
        _take(fd, folder)
        if not _is_at(fd, folder):
            raise OutputError(
                f"another process worked in {folder} and ended just now; run this again"
            )
        yield
    finally:
        os.close(fd)


@contextmanager
def lent(folder: Path) -> Iterator[None]:
    """The caller holds a folder, and so does what it calls: there it counts as locked already."""
    with disk.refusing(f"look at {folder}"):
        found = folder.stat()
    before = _lent.set(_lent.get() | {(found.st_dev, found.st_ino)})
    try:
        yield
    finally:
        _lent.reset(before)


def require_idle(*folders: Path) -> None:
    """OutputError when a process works in one of the folders; those that are not there are idle.

    To be asked before anything is said about what lies there. A folder that is renamed meanwhile is
    found when its names are given in the order that it takes them.
    """
    for folder in folders:
        if folder.is_dir():
            _require_idle(folder)


def _require_idle(folder: Path) -> None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # gone meanwhile, or unreadable, which its use will tell
        return
    try:
        if _is_lent(fd):
            return
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OutputError(_busy(fd, folder)) from error
    except OSError:
        return  # a disk without locks: nobody holds one
    finally:
        os.close(fd)


def _is_lent(fd: int) -> bool:
    found = os.fstat(fd)
    return (found.st_dev, found.st_ino) in _lent.get()


def _opened(folder: Path) -> int:
    with disk.refusing(f"open {folder}"):
        return os.open(folder, os.O_RDONLY | os.O_CLOEXEC)


def _take(fd: int, folder: Path) -> None:
    with disk.refusing(f"lock {folder}", _NO_LOCKS):
        for left in reversed(range(_TRIES)):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if not left:
                    raise OutputError(_busy(fd, folder)) from error
                time.sleep(_PAUSE)
            else:
                return


def _is_at(fd: int, folder: Path) -> bool:
    """Whether an open folder still has that name: its last owner may have renamed or removed it."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(folder))
    except FileNotFoundError:
        return False


def _busy(fd: int, folder: Path) -> str:
    pid = _holder(fd)
    who = "another process" if pid is None else f"another process (pid {pid})"
    if pid == os.getpid():
        who = "another run of this process"
    return f"{who} works in {folder}; wait for it to end, or choose another folder"


def _holder(fd: int) -> int | None:
    """The process that holds an open folder; None where the system does not tell."""
    folder = os.fstat(fd)
    device = f"{os.major(folder.st_dev):02x}:{os.minor(folder.st_dev):02x}"
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return None
    # 4: FLOCK  ADVISORY  WRITE 14145 fe:00:2228241 0 EOF
    wanted = ["FLOCK", "WRITE", f"{device}:{folder.st_ino}"]
    for fields in map(str.split, lines):
        if len(fields) == 8 and [fields[1], fields[3], fields[5]] == wanted:
            return int(fields[4]) if int(fields[4]) > 0 else None
    return None
