"""One scale for a whole tensor does not take many times the tensor's memory."""

import os
import subprocess
import sys

import pytest

from compress_kernels.cpu.library import native
from conftest import REPO

SIDE = 4096
# Pieces that glibc keeps after they were freed are not what this test is about.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "THP_MEM_ALLOC_ENABLE": "1"}
SCRIPT = """
import sys
from pathlib import Path
import torch
from compress.methods import rtn
from compress.methods.rtn import RtnConfig
from compress.quant.scheme import QuantScheme

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(l.split()[1]) for l in lines if l.startswith("VmHWM")) * 1024

scheme = QuantScheme(4, True, "tensor", 0)
def quantize(weight):
    (outcome,) = rtn.quantize([weight], scheme, RtnConfig(), scale_dtype=torch.bfloat16)
    return outcome.error
quantize(torch.randn(64, 64))
side = int(sys.argv[1])
before = peak()
weight = torch.randn(side, side)
error = quantize(weight)
assert 0 < error < 0.1, error
print((peak() - before) / weight.nbytes)
"""


@pytest.mark.skipif(native().library is None, reason=native().reason)
def test_peak_is_below_three_weights() -> None:
    command = [sys.executable, "-c", SCRIPT, str(SIDE)]
    done = subprocess.run(
        command,
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | ALLOCATOR,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 3
