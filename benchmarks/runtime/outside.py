"""How much of a step is outside of compiled code: processor time of the engine's thread.

    python -m benchmarks.runtime.outside --model examples/tale-6m [RESULT ...] [--texts 1 8]

Greedy texts, one or more at once, each of which gets a token a step. `one call` is the program of
the decoder; what is left of a step is scheduling, block tables, detokenisation and events. A tenth
of the steps took the first figure or less. The clock is a call into the system, which takes as long
as a twentieth of what is measured: its own time is measured too, and taken off.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.processes import write_result
from benchmarks.runtime.setting import setting
from compress import Sampling
from compress.runtime.engine.engine import Engine
from compress.runtime.sequences.request import Request
from compress.verbs import open_model
from compress_kernels.cpu.program import Program

PROMPT, OUTPUT, ROUNDS = 25, 200, 8


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, nargs="+", required=True)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result: dict[str, Any] = setting("benchmarks.runtime.outside")
    result["models"] = [measured(path, options.texts) for path in options.model]
    write_result("runtime_outside", result)


def measured(path: Path, texts: Sequence[int]) -> dict[str, Any]:
    model = open_model(path)
    return {
        "model": path.name,
        "math": model.math,
        "clock_us": round(clock_us(), 2),
        "texts": {
            str(count): figures([x for _ in range(ROUNDS) for x in steps(model.engine, count)])
            for count in texts
        },
    }


def steps(engine: Engine, texts: int) -> list[tuple[float, float]]:
    """Microseconds of each step that adds a token to every text, and of its program alone."""
    clock, inside, own = time.thread_time, [0.0], clock_us()
    again = Program.again

    def timed(program: Program) -> None:
        start = clock()
        again(program)
        inside[0] += clock() - start

    for text in range(texts):
        sampling = Sampling(max_tokens=OUTPUT, ignore_eos=True)
        engine.add(Request(str(text), tuple(range(5 + text, 5 + text + PROMPT)), sampling))
    engine.step()
    found = []
    with patch.object(Program, "again", timed):
        while not engine.idle:
            inside[0], start = 0.0, clock()
            engine.step()
            whole = clock() - start
            # From one reading to the next is one reading's time; in a step there are two more.
            found.append((1e6 * whole - 3 * own, 1e6 * inside[0] - own))
    return found


def clock_us(readings: int = 1000) -> float:
    """Microseconds that a reading of the clock takes."""
    times = [time.thread_time() for _ in range(readings)]
    return 1e6 * (times[-1] - times[0]) / (readings - 1)


def figures(found: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Of steps, microseconds of the whole and in the program: of each a tenth and the median.
    share: of the medians, outside over step."""
    parts = {
        "step": [whole for whole, _ in found],
        "one call": [called for _, called in found],
        "outside": [whole - called for whole, called in found],
    }
    result: dict[str, Any] = {
        name: {"tenth_us": round(statistics.quantiles(x, n=10)[0], 1), "median_us": median(x)}
        for name, x in parts.items()
    }
    return {**result, "share": round(median(parts["outside"]) / median(parts["step"]), 4)}


def median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 1)


if __name__ == "__main__":
    main()
