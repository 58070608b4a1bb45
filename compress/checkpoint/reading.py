"""Bytes of a checkpoint's files: what cannot be read is one line, whenever it happens.

A folder may vanish, a disk fail and a file shrink at any time, also hours after it was looked at.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from compress.checkpoint.regular import SCARCE, read_regular
from compress.errors import CheckpointError

MOST_BYTES = 256 << 20  # of a small file: the largest known is a tokenizer.json of 33 MB
_PIECE = 4 << 20


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError into one CheckpointError line: `cannot read PATH: reason`; but for what the
    system lacks at the moment, which says nothing about the file."""
    try:
        yield
    except OSError as error:
        if error.errno in SCARCE:
            raise
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def content_of(path: Path) -> bytes:
    """A small file; CheckpointError when it cannot be read."""
    with reading(path):
        return read_regular(path, MOST_BYTES)


def read_into(
    path: Path, target: memoryview, offset: int, since: str = "after it was opened"
) -> None:
    """Fill `target` (bytes) from byte `offset` of a file.

    since: what the error says of when a file became too short.
    """
    read_parts(path, [target], offset, since)


def read_parts(
    path: Path, parts: Sequence[memoryview], offset: int, since: str = "after it was opened"
) -> None:
    """Fill buffers (of bytes), one behind the other, from byte `offset` of a file on."""
    left = [part for part in parts if len(part)]
    with reading(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while left:
                got = os.preadv(fd, left, offset)  # may be less than asked
                if got == 0:
                    raise CheckpointError(f"{path} became shorter {since}")
                offset += got
                left = _behind(left, got)
        finally:
            os.close(fd)


def pieces(fd: int) -> Iterator[memoryview]:
    """A file from where it is to its end, in pieces that are gone when the next one is asked."""
    buffer = memoryview(bytearray(_PIECE))
    while got := os.readv(fd, [buffer]):
        yield buffer[:got]


def _behind(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of buffers whose first `done` bytes are filled."""
    left = []
    for part in parts:
        taken = min(done, len(part))
        done -= taken
        if taken < len(part):
            left.append(part[taken:])
    return left
