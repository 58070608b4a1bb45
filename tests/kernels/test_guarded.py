"""Compiled code touches nothing behind what it is given (`guarded.py` in this folder)."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from compress_kernels.cpu.library import native

pytestmark = [
    pytest.mark.skipif(native().library is None, reason=native().reason),
    pytest.mark.skipif(sys.platform != "linux", reason="mprotect is called as Linux has it"),
]
HERE = Path(__file__).parent
PARTS = [
    "packed_products",
    "rounded_products",
    "block_products",
    "dense_products",
    "attentions",
    "rows_between",
]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: it ends where a page is touched."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )


def test_a_number_too_many_is_seen() -> None:
    code = "import ctypes, torch, guarded; x = guarded.guarded(torch.ones(3)); end = x.data_ptr();"
    for more, want in ((11, 0), (12, -signal.SIGSEGV)):
        done = run("-c", f"{code} ctypes.c_uint8.from_address(end + {more}).value")
        assert done.returncode == want, done.stderr[-2000:]


def test_nothing_behind_operands_is_touched() -> None:
    done = run(str(HERE / "guarded.py"))
    assert done.stdout.split() == PARTS, (done.returncode, done.stderr[-2000:])
    assert done.returncode == 0
