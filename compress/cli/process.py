"""How this process asks for memory and threads, and how it ends; settled before torch comes in."""

import ctypes
import gc
import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from compress.errors import OutputError

# mallopt: blocks from this size on are mapped, and go back to the system when freed (the most that
# glibc allows); how much freed memory below may stay at the heap's end.
_MMAP_THRESHOLD, _MMAP_BYTES = -3, 32 << 20
_TRIM_THRESHOLD, _TRIM_BYTES = -1, 512 << 20
_PASSING_BYTES = 1 << 20  # both where weights pass one at a time
# New objects between two looks for unreachable circles of them; Python's 700 suits short programs.
_OBJECTS = 1_000_000


def tune_process() -> None:
    """Keep small buffers, give large ones back, let waiting threads sleep.

    What the user has set stays. By itself glibc hands a model's buffers back and takes them again
    all the time: calibrating tale-6m spent 2.4 of 10.6 CPU seconds on page faults, so 0.9 of 8.6,
    with 25 MB less at its peak. Huge pages are what torch asks for with THP_MEM_ALLOC_ENABLE.
    OpenMP threads that spin at barriers took 28 CPU seconds for the same run, sleeping ones 12.
    Its imports make objects that stay: looking through them 900 times for circles took 0.8 CPU
    seconds and found 10,000 small ones, no tensor among them.
    """
    gc.set_threshold(_OBJECTS, 30, 100)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    _tune({_MMAP_THRESHOLD: _MMAP_BYTES, _TRIM_THRESHOLD: _TRIM_BYTES})


def give_back() -> None:
    """Keep nothing of what is freed: for commands through which weights pass one at a time.

    What stays of small ones is there beside the largest: 4 blocks of a 7B model in 4 bits took 1.06
    to 1.41 GB on their way to onnx-genai, and 0.94 so, in as much time.
    """
    _tune({_MMAP_THRESHOLD: _PASSING_BYTES, _TRIM_THRESHOLD: _PASSING_BYTES})


def _tune(numbers: Mapping[int, int]) -> None:
    """Tells glibc, where the C library is that one."""
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # a C library without it: nothing to tune
        return
    for name, value in numbers.items():
        mallopt(name, value)


def leave(code: int) -> NoReturn:
    """End the process now, with that exit code.

    Taking half a million objects apart one by one only to end took 0.8 CPU seconds after torch and
    transformers; the system takes a process's memory back at once.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, OutputError):  # nobody reads on: a closed pipe, a full disk
        code = code or 1
    os._exit(code)
