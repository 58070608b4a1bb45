"""Every change this program makes to a disk goes through these few functions.

They are called as `disk.pwrite(...)`, never imported by name, so that a test can put a fault into
any one of them.
"""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from compress.errors import OutputError

_REMEDIES: Mapping[int, str] = MappingProxyType(
    {
        errno.ENOSPC: "make room or choose another disk",
        errno.EDQUOT: "make room in your quota or choose another disk",
        errno.EFBIG: "this filesystem cannot hold so large a file; use a smaller shard size",
        errno.EACCES: "choose a folder that you may write to",
        errno.EPERM: "choose a folder that you may write to",
        errno.EROFS: "choose a folder that you may write to",
        errno.EBUSY: "it is in use or a mount point; choose a folder inside it",
        errno.EMFILE: "allow more open files (`ulimit -n 1024`), then run it again",
        errno.ENFILE: "close other programs, then run it again",
        errno.ENOMEM: "free memory, then run it again",
        errno.EXDEV: "it is on another filesystem than the folder above it; choose one inside it",
    }
)

# Ends the name of a file that is being written and gets its own by a rename.
TEMPORARY = ".compress-tmp"

# What to do where a disk refuses, if nothing better is known: a run is resumed.
RESUME = "look after the disk, then run again with --resume"

# What work and its end take at once: the lock, the spare one, a file read and a file written.
_HANDLES = 4
_spare: list[int] = []


def require_handles(folder: Path) -> None:
    """OSError unless files can be opened, before a folder is made that could not be removed."""
    taken: list[int] = []
    try:
        taken += (os.open(folder, os.O_RDONLY | os.O_CLOEXEC) for _ in range(_HANDLES))
    finally:
        for fd in taken:
            os.close(fd)


@contextmanager
def spare_handle() -> Iterator[None]:
    """Hold one handle for cleaning up: to list a folder takes one, and work may end because there
    are none."""
    _spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    try:
        yield
    finally:
        use_spare_handle()


def use_spare_handle() -> None:
    """Give up what `spare_handle` holds: cleaning up begins."""
    while _spare:
        os.close(_spare.pop())


def open_write(path: Path) -> int:
    """File descriptor for writing; the file is made when it is not there, never truncated."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def open_private(path: Path) -> int:
    """File descriptor of a new file that nobody else may read; OSError where there is one."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o600)


def pwrite(fd: int, data: memoryview, offset: int) -> int:
    """Write some bytes at an offset; returns how many were taken."""
    return os.pwrite(fd, data, offset)


def fallocate(fd: int, size: int) -> None:
    """Reserve `size` bytes of disk for the file, where the system can; OSError when full."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def begin_writeback(fd: int, offset: int, length: int) -> None:
    """Let the disk begin on what was just written, where the system knows such a hint.

    Without it Linux waits until a tenth of the memory is unwritten or an fsync asks for all of it,
    and the disk idles meanwhile. Pages that are not on the disk yet stay in the cache.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # a hint: what fails to be written shows at the fsync
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def truncate(fd: int, size: int) -> None:
    os.ftruncate(fd, size)


def fsync(fd: int) -> None:
    os.fsync(fd)


def rename(source: Path, target: Path) -> None:
    os.rename(source, target)


def unlink(path: Path) -> None:
    os.unlink(path)


def mkdir(path: Path) -> None:
    os.mkdir(path)


def mkdir_private(path: Path) -> None:
    """A folder that nobody else may look into."""
    os.mkdir(path, 0o700)


def chmod(path: Path, mode: int) -> None:
    os.chmod(path, mode)


def touch(path: Path) -> None:
    """Give a file the time of now."""
    os.utime(path)


def rmdir(path: Path) -> None:
    os.rmdir(path)


@contextmanager
def refusing(doing: str, remedy: str = RESUME) -> Iterator[None]:
    """Turn an OSError into one OutputError line: `cannot DOING: reason; remedy`.

    remedy: for errors that have none of their own.
    """
    try:
        yield
    except OSError as error:
        mend = _REMEDIES.get(error.errno or 0, remedy)
        raise OutputError(f"cannot {doing}: {error.strerror or error}; {mend}") from error


def write_all(fd: int, data: memoryview, offset: int, chunk: int = 64 << 20) -> None:
    """Write all of `data` (bytes, one dimension) at an offset, however little a call takes."""
    done = 0
    while done < len(data):
        done += pwrite(fd, data[done : done + chunk], offset + done)


def fsync_path(path: Path) -> None:
    """fsync a file or a directory; a filesystem that cannot sync directories is left alone."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(fd)


def remove_tree(path: Path) -> None:
    """Remove a file, a link (not what it points to) or a folder with all it holds."""
    use_spare_handle()
    if path.is_dir() and not path.is_symlink():
        for entry in sorted(path.iterdir()):
            remove_tree(entry)
        rmdir(path)
    else:
        unlink(path)
