"""Triton kernels in Triton's interpreter against the references, and compiled for sm_90.

The interpreter is chosen when triton is imported, so these tests run in a process of their own
(`interpreted.py`, `compiled.py` in this folder), once for all cases.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
CASES = [
    "scale-sym", "scale-asym-weighted", "scale-sym-fp16", "scale-fp16",
    "columns-g8", "columns-g12-asym", "columns-wide-group", "columns-fixed-order", "gram-fp16",
]  # fmt: skip


def outcome(script: str, interpret: str) -> dict[str, dict[str, float]]:
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": interpret}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / script)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, dict[str, float]] = json.loads(done.stdout)
    return result


# All cases in one test: workers of pytest that shared them would each start the process, 3 s and
# more.
def test_interpreted_equals_reference() -> None:
    found = outcome("interpreted.py", "1")
    assert list(found) == CASES
    for case, got in found.items():
        assert got["equal"] >= 0.999, (case, got)
        assert got["error"] <= 1e-5, (case, got)


def test_compiles_for_hopper_without_spills() -> None:
    found = outcome("compiled.py", "0")
    assert found.keys() == {"block", "block-fixed", "scale", "gram"}
    for kernel, got in found.items():
        assert got["spills"] == 0, (kernel, got)
        assert 0 < got["registers"] <= 255, (kernel, got)
        assert got["shared"] <= 227 * 1024, (kernel, got)
