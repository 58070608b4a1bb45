"""The engine beside processes that want the same cores.

    python -m benchmarks.runtime.crowd [--requests 64] [--threads 1 2] [--spinning 2] [--rounds 5]

tale-6m by `compress-model bench`, in fp32. Loads alone and beside so many processes that do nothing
but spin take turns; of each the median tokens a second, and the share that the crowd leaves.
Whatever else runs on the machine is in both.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.processes import REPO, SHARED, write_result
from benchmarks.runtime.setting import setting

BENCH = (sys.executable, "-m", "compress.cli", "bench", str(SHARED / "models" / "tale-6m"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--spinning", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {**setting("benchmarks.runtime.crowd"), "options": vars(options)}
    rates: dict[tuple[int, bool], list[float]] = {}
    for _ in range(options.rounds):
        for threads in options.threads:
            for crowded in (False, True):
                with crowd(options.spinning if crowded else 0):
                    rate = tokens_per_second(options.requests, threads)
                rates.setdefault((threads, crowded), []).append(rate)
    for threads in options.threads:
        alone, beside = (statistics.median(rates[threads, crowded]) for crowded in (False, True))
        result[f"{threads} threads"] = {
            "alone": round(alone),
            "beside": round(beside),
            "left": round(beside / alone, 3),
            "all": {"alone": rates[threads, False], "beside": rates[threads, True]},
        }
    write_result("runtime_crowd", result)


def tokens_per_second(requests: int, threads: int) -> float:
    asked = ("--batch", str(requests), "--threads", str(threads), "--json")
    done = subprocess.run([*BENCH, *asked], cwd=REPO, capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)["measured"][0]
    return float(measured["tokens_per_second"]["measured"])


@contextmanager
def crowd(count: int) -> Iterator[None]:
    """`count` processes that spin."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
