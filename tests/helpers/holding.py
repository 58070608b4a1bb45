"""Another process that works in a folder, as far as others can tell: it holds the lock."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLD = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_elsewhere(folder: Path) -> Iterator[int]:
    """A second process holds `folder` while the block runs; gives its pid."""
    command = [sys.executable, "-S", "-c", _HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            yield process.pid
        finally:
            process.kill()


def alive(folder: Path, pid: int) -> str:
    """What is said of it."""
    return (
        f"another process (pid {pid}) works in {folder}; wait for it to end, or choose another"
        " folder"
    )
