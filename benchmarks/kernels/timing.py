"""Alternating runs and what a reader needs to judge them; shared by the benchmark scripts."""

import argparse
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

from compress_kernels.cpu.library import instruction_sets

Cases = Mapping[str, Callable[[], object]]


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
    cases: Cases, rounds: int, calls: int = 1, settling: float = 0.0
) -> dict[str, dict[str, float]]:
    """Median wall and CPU seconds of each case, one run of each a round, first round not counted.

    Cases take turns, so that other load on the machine falls on all of them alike. calls: of a case
    in a run, where one is too short to be timed; seconds are those of one. settling: for so many
    seconds a case runs before it is timed, until the threads of the one before have fallen asleep
    and its own have not.
    """
    walls: dict[str, list[float]] = {name: [] for name in cases}
    cpus: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, run in cases.items():
            begin = time.perf_counter()
            while time.perf_counter() - begin < settling:
                run()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(calls):
                run()
            if number:
                cpus[name].append((time.process_time() - cpu) / calls)
                walls[name].append((time.perf_counter() - wall) / calls)
    return {
        name: {
            "wall_s": float(f"{statistics.median(walls[name]):.4g}"),
            "cpu_s": float(f"{statistics.median(cpus[name]):.4g}"),
            "least_wall_s": float(f"{min(walls[name]):.4g}"),
        }
        for name in cases
    }


def side_by_side(cases: Cases, rounds: int, least: float = 0.004) -> dict[str, Any]:
    """Of cases that take turns the seconds, and how many times our processor time each other takes,
    or wall time where there are several threads.

    The first is ours. Those named `ceiling ...` are what the machine can do, so that of these it is
    the share that we reach.

    least: processor seconds of a run, so that short calls are timed together.
    """
    first, *others = cases
    start = time.process_time()
    cases[first]()
    once = max(time.process_time() - start, 1e-7)
    times = alternate(cases, rounds, calls=max(1, int(least / once)))
    clock = "cpu_s" if torch.get_num_threads() == 1 else "wall_s"
    ratios = {name: round(times[name][clock] / times[first][clock], 3) for name in others}
    return {"times": times, "times_ours": ratios}


def kernel_main(
    about: str, shapes: Mapping[str, Callable[[], Mapping[str, Callable[[], object]]]]
) -> None:
    """The command line of a benchmark of one operation: every shape, one after the other.

    about: the script's docstring. shapes: name -> its cases, ours first.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", help="file for the JSON result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = "processor" if options.threads == 1 else "wall"
    result: dict[str, Any] = {
        **setting(),
        "isa": sorted(instruction_sets()),
        "ratios": f"of {clock} time, sides in turn in one process",
        "rounds": options.rounds,
        "shapes": {},
    }
    with torch.inference_mode():
        for name, make in shapes.items():
            torch.manual_seed(0)
            result["shapes"][name] = side_by_side(make(), options.rounds)
    write(options.output, result)


def write(path: str | None, result: Mapping[str, Any]) -> None:
    """Print the result as JSON and, with a path, store it."""
    text = json.dumps(result, indent=1)
    print(text)
    if path:
        Path(path).write_text(text + "\n")
