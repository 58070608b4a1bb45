"""One file of the cache: bytes, what they are of, and a checksum, so that damage is noticed.

MAGIC | sha256 of the facts, 32 bytes | the bytes | XXH3-128 of both, 16 bytes
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from compress.checkpoint import disk

MAGIC = b"compress-model made 1\n"
SUFFIX = ".made"
_HEAD, _TAIL = len(MAGIC) + 32, 16
PIECE = 4 << 20  # bytes that are read at once, unless a row is larger

Take = Callable[[memoryview], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """What is looked for. kind: a word. facts: all that the bytes depend on, as JSON can say it.
    nbytes: how many they are. row: bytes that come together; pieces are multiples of it."""

    kind: str
    facts: Mapping[str, Any]
    nbytes: int
    row: int = 1

    @property
    def digest(self) -> bytes:
        """sha256 of the facts."""
        text = json.dumps([self.kind, self.nbytes, self.facts], sort_keys=True)
        return hashlib.sha256(text.encode()).digest()

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.digest.hex()[:40]}{SUFFIX}"

    @property
    def file_bytes(self) -> int:
        return _HEAD + self.nbytes + _TAIL


def read_entry(path: Path, entry: Entry, take: Take) -> bool:
    """Hand the bytes to `take`, piece by piece; False where the file is not whole, and what was
    taken is then worth nothing. OSError where there is none."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.fstat(fd)
        if found.st_size != entry.file_bytes or found.st_uid != os.geteuid():
            return False
        head = os.pread(fd, _HEAD, 0)
        if head != MAGIC + entry.digest:
            return False
        return _payload(fd, entry, take)
    finally:
        os.close(fd)


def _payload(fd: int, entry: Entry, take: Take) -> bool:
    sums, piece = xxhash.xxh3_128(entry.digest), max(entry.row, PIECE // entry.row * entry.row)
    for start in range(0, entry.nbytes, piece):
        wanted = min(piece, entry.nbytes - start)
        data = bytearray(wanted)
        if os.preadv(fd, [data], _HEAD + start) != wanted:
            return False
        sums.update(data)
        take(memoryview(data))
    return os.pread(fd, _TAIL, _HEAD + entry.nbytes) == sums.digest()


def write_entry(fd: int, entry: Entry, pieces: Iterable[memoryview]) -> None:
    """Fill a new file. pieces: all bytes, in order."""
    sums, offset = xxhash.xxh3_128(entry.digest), _HEAD
    disk.write_all(fd, memoryview(MAGIC + entry.digest), 0)
    for piece in pieces:
        sums.update(piece)
        disk.write_all(fd, piece, offset)
        offset += len(piece)
    assert offset == _HEAD + entry.nbytes, "an entry says how many bytes it has"
    disk.write_all(fd, memoryview(sums.digest()), offset)
