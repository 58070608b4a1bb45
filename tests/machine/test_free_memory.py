"""Free memory is the least of what the machine and its control groups leave."""

from pathlib import Path

import pytest

from compress.machine import memory
from compress.machine.memory import available_bytes, cache_bytes, limit_bytes

MACHINE = 8000 * 1024
UNLIMITED = "9223372036854771712"  # as version 1 writes it


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    put(tmp_path / "proc" / "meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    return tmp_path


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group_v2(folder: Path, limit: str, used: int, cache: int = 0) -> None:
    put(folder / "memory.max", limit + "\n")
    put(folder / "memory.current", f"{used}\n")
    put(folder / "memory.stat", f"anon {used - cache}\ninactive_file {cache}\n")


def test_a_machine_without_groups(system: Path) -> None:
    assert (available_bytes(), limit_bytes()) == (MACHINE, None)


def test_a_system_that_says_nothing(system: Path) -> None:
    (system / "proc" / "meminfo").unlink()
    assert (available_bytes(), limit_bytes()) == (None, None)


def test_the_tightest_group_counts_and_cache_is_free(system: Path) -> None:
    put(system / "proc" / "self" / "cgroup", "0::/job/task\n")
    group_v2(system / "cgroup" / "job", "5000", 4500, cache=1000)
    group_v2(system / "cgroup" / "job" / "task", "max", 10)
    assert (available_bytes(), limit_bytes()) == (1500, 5000)
    group_v2(system / "cgroup" / "job" / "task", "3000", 3100)
    assert (available_bytes(), limit_bytes()) == (0, 3000)


def test_version_1_inside_a_container(system: Path) -> None:
    put(system / "proc" / "self" / "cgroup", "4:cpu,memory:/host/path\n1:cpu:/x\n")
    root = system / "cgroup" / "memory"
    put(root / "memory.limit_in_bytes", "7000\n")
    put(root / "memory.usage_in_bytes", "3000\n")
    put(root / "memory.stat", "total_inactive_file 500\n")
    assert (available_bytes(), limit_bytes()) == (4500, 7000)
    put(root / "memory.limit_in_bytes", UNLIMITED + "\n")
    assert (available_bytes(), limit_bytes()) == (MACHINE, None)


def test_the_largest_cache(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CACHES", system / "cache")
    assert cache_bytes() == 0
    for index, size in enumerate(("48K", "1024K", "32768K", "")):
        put(system / "cache" / f"index{index}" / "size", size + "\n")
    assert cache_bytes() == 32 * 2**20
