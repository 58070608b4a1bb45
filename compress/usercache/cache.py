"""The cache: entries in one folder, of which the least recently used go when it is full.

Several processes may share it. An entry appears whole, by a rename; who reads one that is removed
meanwhile reads on. One process at a time makes room, under a lock. Nothing here ends a run: what
cannot be read is made anew, what cannot be written is not kept.
"""

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from compress.checkpoint import disk, free_bytes
from compress.errors import CompressError
from compress.usercache.entry import SUFFIX, Entry, Take, read_entry, write_entry
from compress.usercache.place import made_folder, most_bytes

_TEMPORARY = ".tmp"
_LOCK = "lock"
_TRIES, _PAUSE = 20, 0.01  # to make room takes milliseconds
_SHARE = 2  # an entry may take one part in so many of the cache, and of the free disk


@dataclass(frozen=True, slots=True)
class UserCache:
    """folder: of the entries, made when the first is kept. most: bytes of all of them. taken: what
    this process has found in it, in words, each once."""

    folder: Path
    most: int
    taken: dict[str, None] = field(default_factory=dict)

    def find(self, entry: Entry, take: Take, said: str) -> bool:
        """Hand what is kept to `take`, piece by piece, and note it as `said`. False where nothing
        is kept, or nothing whole: that is removed, and what was taken of it is worth nothing."""
        path = self.folder / entry.name
        try:
            whole = read_entry(path, entry, take)
            if not whole:
                disk.unlink(path)
                return False
        except OSError:
            return False
        with suppress(OSError):
            disk.touch(path)
        self.taken[said] = None
        return True

    def keep(self, entry: Entry, pieces: Callable[[], Iterable[memoryview]]) -> None:
        """Keep the bytes for `find`, where there is room. pieces: reads them, in order."""
        if entry.file_bytes > self.most // _SHARE:
            return
        with suppress(OSError, CompressError):
            self._prepare()
            if entry.file_bytes <= free_bytes(self.folder) // _SHARE:
                self._write(entry, pieces)

    def usage(self) -> tuple[int, int]:
        """Entries, and their bytes."""
        found = list(_entries(self.folder))
        return len(found), sum(each.nbytes for each in found)

    def _prepare(self) -> None:
        """The folder is there, and nobody else's. OSError where it is."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            disk.mkdir_private(self.folder)
        found = os.lstat(self.folder)
        if found.st_uid != os.geteuid() or not os.path.isdir(self.folder):
            raise PermissionError(f"{self.folder} belongs to another user")
        if found.st_mode & 0o777 != 0o700:
            disk.chmod(self.folder, 0o700)

    def _write(self, entry: Entry, pieces: Callable[[], Iterable[memoryview]]) -> None:
        path = self.folder / f".{entry.name}.{os.getpid()}.{secrets.token_hex(4)}{_TEMPORARY}"
        fd = disk.open_private(path)
        try:
            # Held while it is written: one that nobody holds was left by a process that died.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_entry(fd, entry, pieces())
            with self._alone():
                self._make_room(entry)
                disk.rename(path, self.folder / entry.name)
        finally:
            os.close(fd)
            with suppress(FileNotFoundError):
                disk.unlink(path)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """BlockingIOError where another process does not let go of the cache."""
        fd = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for left in reversed(range(_TRIES)):
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not left:
                        raise
                    time.sleep(_PAUSE)
            yield
        finally:
            os.close(fd)

    def _make_room(self, entry: Entry) -> None:
        """The least recently used entries go until this one fits, and what dead processes left."""
        for path in self.folder.glob(f".*{_TEMPORARY}"):
            _remove_dead(path)
        others = [x for x in _entries(self.folder) if x.path.name != entry.name]
        taken = sum(x.nbytes for x in others) + entry.file_bytes
        for oldest in sorted(others, key=lambda x: (x.used, x.path.name)):
            if taken <= self.most:
                return
            with suppress(FileNotFoundError):
                disk.unlink(oldest.path)
            taken -= oldest.nbytes


@dataclass(frozen=True, slots=True)
class _Listed:
    """An entry that is there. used: when it was last asked for, ns since the epoch."""

    path: Path
    nbytes: int
    used: int


def user_cache(asked: bool | Path = True) -> UserCache | None:
    """The cache that is asked for: the user's for True, none for False, or one in that folder.

    None also where the user's environment wants none; RequestError where it asks for no size.
    """
    if asked is False:
        return None
    most = most_bytes()
    if not isinstance(asked, bool):
        return UserCache(asked, most or 1 << 62)
    return UserCache(made_folder(), most) if most else None


def taken(kept: UserCache | None) -> tuple[str, ...]:
    """A line for the report where something was found: times are without what made it."""
    if kept is None or not kept.taken:
        return ()
    found = " and ".join(kept.taken)
    return (f"{found}: taken from the cache, so the times are without it (--no-cache makes it)",)


def _entries(folder: Path) -> Iterator[_Listed]:
    try:
        found = list(os.scandir(folder))
    except OSError:
        return
    for each in found:
        with suppress(OSError):
            if each.name.endswith(SUFFIX) and each.is_file(follow_symlinks=False):
                facts = each.stat(follow_symlinks=False)
                yield _Listed(Path(each.path), facts.st_size, facts.st_mtime_ns)


def _remove_dead(path: Path) -> None:
    """Remove a file that is half written where no process writes it."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            disk.unlink(path)
        finally:
            os.close(fd)
