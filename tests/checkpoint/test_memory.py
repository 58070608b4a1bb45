"""Reading and writing a checkpoint larger than any tensor in it takes the memory of one tensor."""

import os
import subprocess
import sys
from pathlib import Path

from conftest import REPO

_TENSORS, _MB = 5, 30

# By default glibc keeps freed blocks below 32 MB, and those of aligned allocations pile up in
# pieces: 30 tensors of 30 MB, one at a time, leave 246 MB behind. That is the allocator's doing and
# not what this test is about.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "THP_MEM_ALLOC_ENABLE": "1"}

_SCRIPT = """
import sys
from pathlib import Path
import torch
from compress.checkpoint import Checkpoint, ShardWriter, plan_shards

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(l.split()[1]) for l in lines if l.startswith("VmHWM")) / 1024

folder, count, megabytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
shape = (megabytes, 1 << 18)
layout = plan_shards([(f"t{i}", "F32", shape) for i in range(count)], 100 << 20)
torch.ones(8).sum()
before = peak()
writer = ShardWriter.create(folder, layout)
for i in range(count):
    writer.write(f"t{i}", torch.full(shape, float(i)))
writer.finish()
wrote = peak() - before
(folder / "config.json").write_text("{}")
checkpoint = Checkpoint.open(folder)
for i, name in enumerate(checkpoint.tensors):
    tensor = checkpoint.read(name, check_finite=True)
    assert tensor[-1, -1] == i
    del tensor
print(wrote, peak() - before)
"""


def test_peak_is_one_tensor(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path), str(_TENSORS), str(_MB)]
    environment = os.environ | _ALLOCATOR
    done = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    wrote, both = map(float, done.stdout.split())
    assert wrote < 1.5 * _MB
    assert both < 1.5 * _MB
