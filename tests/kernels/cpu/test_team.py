"""The team of threads: right whoever calls it and when, and asleep when nobody does."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from compress_kernels import gram_
from compress_kernels.cpu import quota
from compress_kernels.cpu.gram import has_bf16
from compress_kernels.cpu.library import native
from compress_kernels.ops.linear import linear

pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)

PRELUDE = """
import os, sys, time, torch
from compress_kernels.ops.linear import linear
torch.manual_seed(0)
x, w = torch.randn(64, 300), torch.randn(400, 300)
torch.set_num_threads(1)
want = linear(x, w)
torch.set_num_threads(4)
assert torch.equal(linear(x, w), want)
"""


@pytest.fixture(autouse=True)
def _own_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(code: str) -> float:
    """Seconds that a process takes from the last line of `code` to its end."""
    code = f"{PRELUDE}\n{code}\nprint(time.time(), flush=True)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return time.time() - float(done.stdout.split()[-1])


@pytest.mark.parametrize("threads", [2, 3, 4, 64])
def test_nobody_sees_who_computed_what(threads: int) -> None:
    x, w, gram = torch.randn(64, 300), torch.randn(400, 300), torch.randn(900, 130).bfloat16()
    found = []
    for count in (1, threads):
        torch.set_num_threads(count)
        total = torch.zeros(130, 130)
        gram_(gram, total)
        found.append((linear(x, w), total))
    for _ in range(50):
        assert torch.equal(linear(x, w), found[0][0])
    if has_bf16():  # torch's sums depend on its threads
        assert torch.equal(found[0][1], found[1][1])


def test_callers_at_once_do_not_disturb_each_other() -> None:
    torch.set_num_threads(4)
    inputs = [(torch.randn(32 + i, 200), torch.randn(300, 200)) for i in range(8)]
    wanted = [linear(x, w) for x, w in inputs]

    def call(i: int) -> bool:
        torch.set_num_threads(2 + i % 3)  # one number for each thread of Python
        return all(torch.equal(linear(*inputs[i]), wanted[i]) for _ in range(100))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(8)))


def test_a_child_of_fork_has_a_team_of_its_own() -> None:
    seconds = run(
        """
from threading import Thread
stop = []
def work():
    while not stop: linear(x, w)
other = Thread(target=work); other.start()  # calls go on while the process forks
for _ in range(5):
    child = os.fork()
    if child == 0:
        right = all(torch.equal(linear(x, w), want) for _ in range(20))
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.append(True); other.join()
assert torch.equal(linear(x, w), want)
"""
    )
    assert seconds < 5


def test_a_process_ends_while_others_call() -> None:
    seconds = run(
        """
import ctypes
from threading import Thread
from compress_kernels.cpu.library import native
from compress_kernels.cpu.linear import LinearStruct
out = torch.empty(64, 400)
task = LinearStruct(x.data_ptr(), w.data_ptr(), None, out.data_ptr(), 64, 300, 400, 300, 400, 4)
call, task = native().library.linear_rows, ctypes.byref(task)
def work():  # torch's own calls abort where Python ends beside them
    while True: call(task)
for _ in range(2): Thread(target=work, daemon=True).start()
linear(x, w)
"""
    )
    assert seconds < 5


def test_helpers_sleep_when_nobody_calls() -> None:
    x, w = torch.randn(64, 300), torch.randn(400, 300)
    torch.set_num_threads(4)
    linear(x, w)
    time.sleep(0.005)
    before = time.process_time()
    time.sleep(0.1)
    assert time.process_time() - before < 0.02


GROUPS = {
    "2": ("0::/a/b\n", {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1.5),
    "2, of the host": ("0::/host/path\n", {"cpu.max": "50000 100000\n"}, 0.5),
    "1": (
        "4:memory:/m\n3:cpu,cpuacct:/a\n",
        {"cpu/a/cpu.cfs_quota_us": "300000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
        3.0,
    ),
    "1, none": (
        "3:cpu:/\n",
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        0.0,
    ),
    "nothing": ("", {}, 0.0),
}


@pytest.mark.parametrize(("own", "files", "want"), GROUPS.values(), ids=GROUPS)
def test_quotas_of_containers(
    own: str,
    files: dict[str, str],
    want: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quota, "PROC", tmp_path / "proc")
    monkeypatch.setattr(quota, "CGROUPS", tmp_path / "cgroup")
    files = {f"cgroup/{name}": text for name, text in files.items()}
    for name, text in {**files, "proc/self/cgroup": own}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert quota.quota() == want


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
def test_a_team_is_no_larger_than_what_its_caller_may_use() -> None:
    run(
        """
from compress_kernels.cpu.library import native
def of_others():
    before = time.process_time() - time.thread_time()
    for _ in range(50): assert torch.equal(linear(x, w), want)
    return time.process_time() - time.thread_time() - before
allowed = os.sched_getaffinity(0)
os.sched_setaffinity(0, {min(allowed)})
linear(x, w); time.sleep(0.01)
assert of_others() < 0.002
os.sched_setaffinity(0, allowed)
assert torch.equal(linear(x, w), want)
torch.set_num_threads(1)
time.sleep(0.01)
assert of_others() < 0.002
torch.set_num_threads(4)
assert torch.equal(linear(x, w), want)
native().library.team_quota(1.0)
time.sleep(0.01)
assert of_others() < 0.002
"""
    )
