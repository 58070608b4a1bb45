"""Alternating runs and what a reader needs to judge them; shared by the benchmark scripts."""

import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def cpu_model() -> str:
    """Name, family and model number of the CPU."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    fields: dict[str, str] = {}
    for line in info.read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    wanted = ("model name", "cpu family", "model")
    return ", ".join(f"{name} {fields[name]}" for name in wanted if name in fields)


def setting() -> dict[str, Any]:
    """Machine, versions, date and command line."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "load_average": Path("/proc/loadavg").read_text().split()[0]
        if Path("/proc/loadavg").exists()
        else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def alternate(
    cases: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, dict[str, float]]:
    """Median wall and CPU seconds of each case, one run of each a round, first round not counted.

    Cases take turns, so that other load on the machine falls on all of them alike.
    """
    walls: dict[str, list[float]] = {name: [] for name in cases}
    cpus: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, run in cases.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            if number:
                cpus[name].append(time.process_time() - cpu)
                walls[name].append(time.perf_counter() - wall)
    return {
        name: {
            "wall_s": round(statistics.median(walls[name]), 6),
            "cpu_s": round(statistics.median(cpus[name]), 6),
            "least_wall_s": round(min(walls[name]), 6),
        }
        for name in cases
    }


def write(path: str | None, result: Mapping[str, Any]) -> None:
    """Print the result as JSON and, with a path, store it."""
    text = json.dumps(result, indent=1)
    print(text)
    if path:
        Path(path).write_text(text + "\n")
