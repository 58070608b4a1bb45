"""The end of the process: at once, but with everything said and the right exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def ending(code: int, stdout: int) -> subprocess.CompletedProcess[str]:
    script = (
        "import sys; from compress.cli.process import leave;"
        f" sys.stdout.write('out'); sys.stderr.write('err'); leave({code})"
    )
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPO,
        env={**os.environ, "PYTHONUNBUFFERED": ""},  # buffered, as without the variable
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("code", [0, 2, 130])
def test_output_is_flushed_and_the_code_kept(code: int) -> None:
    done = ending(code, subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (code, "out", "err")


@pytest.mark.parametrize(("code", "left"), [(0, 1), (2, 2)])
def test_output_that_nobody_reads_is_no_success(code: int, left: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert ending(code, writer).returncode == left
    finally:
        os.close(writer)
