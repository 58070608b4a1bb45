"""Whole processes: what one costs, and how busy the machine was beside it.

Standard library only: on Linux a child's peak memory begins with that of the process it was started
from, so what measures must stay small.
"""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
SHARED = REPO.parent / "shared"
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True)
class Cost:
    """One process, start to end, its children included.

    others: share of the machine's processor time that went to other processes meanwhile.
    """

    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    others: float


# Python settings of this shell that cost a program time: modules compiled anew at every start.
SLOWING = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
# A run that is timed makes all that it needs, unless a benchmark says otherwise.
NOTHING_KEPT = {"COMPRESS_MODEL_CACHE": "0"}


def run(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Cost:
    """Run a command to its end; its output goes to `log`. RuntimeError with its last lines if it
    fails."""
    given = os.environ if environment is None else environment
    environment = {**NOTHING_KEPT, **{k: v for k, v in given.items() if k not in SLOWING}}
    busy, began = busy_seconds(), time.perf_counter()
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=REPO, env=environment
        )
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - began
    if child.returncode != 0:
        tail = log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{shlex.join(command)} gave {child.returncode}:\n{tail}")
    cpu = usage.ru_utime + usage.ru_stime
    others = (busy_seconds() - busy - cpu) / (wall * (os.cpu_count() or 1))
    return Cost(wall, cpu, usage.ru_maxrss * 1024, max(0.0, others))


def busy_seconds() -> float:
    """Processor seconds the whole machine has spent, what a hypervisor took included."""
    numbers = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = numbers[:8]
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(most: float, seconds: float = 5.0) -> None:
    """Return as soon as the machine spent less than that share of its time for `seconds`."""
    while True:
        busy, began = busy_seconds(), time.perf_counter()
        time.sleep(seconds)
        passed = (time.perf_counter() - began) * (os.cpu_count() or 1)
        share = (busy_seconds() - busy) / passed
        if share < most:
            return
        print(f"the machine is {share:.0%} busy; waiting for {most:.0%}", file=sys.stderr)


def setting(module: str) -> dict[str, Any]:
    """How and where a result was made; `module` is the benchmark that was run."""
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "threads": os.environ.get("OMP_NUM_THREADS", "as torch chooses"),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=REPO, capture_output=True, text=True
        ).stdout.strip(),
    }


def cpu_model() -> str:
    """Name, family and model number of the processor."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    wanted = ("model name", "cpu family", "model")
    return ", ".join(f"{name} {fields[name]}" for name in wanted if name in fields)


def package_versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Versions of packages in the environment of another interpreter."""
    code = (
        "import json,sys;from importlib.metadata import version;"
        "print(json.dumps({p: version(p) for p in sys.argv[1:]}))"
    )
    done = subprocess.run(
        [python, "-c", code, *packages], capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def stored_result(name: str) -> dict[str, Any]:
    """benchmarks/results/NAME.json."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def threads_suffix(threads: int) -> str:
    """Of a result's name, where it is of more than one thread."""
    return "" if threads == 1 else f"_{threads}_threads"


def write_result(name: str, result: Mapping[str, Any]) -> None:
    """Print a result and store it as benchmarks/results/NAME.json."""
    text = json.dumps(result, indent=1)
    print(text)
    (RESULTS / f"{name}.json").write_text(text + "\n")
