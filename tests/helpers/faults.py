"""Faults at the n-th change of the disk: a kill, a torn write, a full disk.

All changes go through compress.checkpoint.disk, so a test that runs something once with
`counting()` knows how many places there are, and can then fail each of them with `fault_at`.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

from compress.checkpoint import disk

OPERATIONS = (
    *("open_write", "pwrite", "fallocate", "truncate", "fsync"),
    *("rename", "unlink", "mkdir", "rmdir"),
)
Effect = Literal["before", "torn", "after", "exit", "enospc"]


class Killed(BaseException):
    """The process died here; no handler of ordinary errors sees it."""


@dataclass
class Calls:
    """What was done to the disk so far: names of operations, in order."""

    names: list[str] = field(default_factory=list)
    dead: bool = False

    def __len__(self) -> int:
        return len(self.names)


@contextmanager
def counting() -> Iterator[Calls]:
    """Record the operations of the block and change nothing."""
    with _patched(None, "before") as calls:
        yield calls


@contextmanager
def fault_at(number: int, effect: Effect = "before") -> Iterator[Calls]:
    """Let the operation with that number (from 0) fail.

    before: raise Killed instead of doing it. after: do it, then raise Killed. torn: a pwrite puts
    half of its bytes, then Killed (any other operation: as before). exit: os._exit(137), for
    children. enospc: OSError "no space left" from pwrite or fallocate, as often as it is tried.

    After Killed every further operation raises Killed too: a dead process cleans up nothing.
    """
    with _patched(number, effect) as calls:
        yield calls


@contextmanager
def _patched(number: int | None, effect: Effect) -> Iterator[Calls]:
    calls = Calls()
    wrappers = {
        name: _wrap(name, getattr(disk, name), calls, number, effect) for name in OPERATIONS
    }
    with mock.patch.multiple(disk, **wrappers):
        yield calls


def _wrap(
    name: str, real: Callable[..., Any], calls: Calls, number: int | None, effect: Effect
) -> Callable[..., Any]:
    def wrapper(*args: Any) -> Any:
        if calls.dead:
            raise Killed(name)
        calls.names.append(name)
        here = number == len(calls) - 1
        if effect == "enospc":
            return _full_disk(name, real, args, number is not None and len(calls) > number)
        return _die(name, real, args, calls, effect) if here else real(*args)

    return wrapper


def _full_disk(name: str, real: Callable[..., Any], args: tuple[Any, ...], full: bool) -> Any:
    if full and name in ("pwrite", "fallocate"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return real(*args)


def _die(
    name: str, real: Callable[..., Any], args: tuple[Any, ...], calls: Calls, effect: Effect
) -> Any:
    if effect == "exit":
        os._exit(137)
    if effect == "after":
        real(*args)
    if effect == "torn" and name == "pwrite":
        fd, data, offset = args
        real(fd, data[: len(data) // 2], offset)
    calls.dead = True
    raise Killed(f"{name}, operation {len(calls) - 1}")
