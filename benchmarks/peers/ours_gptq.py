"""`compress-model` as a whole process, with a clock around the solves.

    python -m benchmarks.peers.ours_gptq CLOCK run RECIPE --model MODEL --out OUT

CLOCK: JSON file for the seconds spent in the gptq method, which are: factor, scale search, column
loop, plain rounding beside it and the error of both. The rest of the line is the command line's.
"""

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compress import pipeline
from compress.cli.main import main as command_line


@dataclass(slots=True)
class Spent:
    """Seconds inside solves so far."""

    solves: int = 0
    wall: float = 0.0
    cpu: float = 0.0


def clocked(spent: Spent, quantize: Any) -> Any:
    """A method's quantize function that adds up its seconds."""

    def call(*args: Any, **kwargs: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            return quantize(*args, **kwargs)
        finally:
            spent.solves += 1
            spent.wall += time.perf_counter() - wall
            spent.cpu += time.process_time() - cpu

    return call


def main() -> int:
    clock, *line = sys.argv[1:]
    spent = Spent()

    def run(*args: Any, **kwargs: Any) -> Any:
        # Only now: the command line sets the process up before torch is imported.
        from compress.methods import METHODS
        from compress.pipeline import calibrated, job

        gptq = METHODS["gptq"]
        timed = replace(gptq, quantize=clocked(spent, gptq.quantize))
        calibrated.METHODS = {**METHODS, "gptq": timed}
        return job.run(*args, **kwargs)

    pipeline.run = run
    code = command_line(line)
    result = {"solves": spent.solves, "solve_wall_s": spent.wall, "solve_cpu_s": spent.cpu}
    Path(clock).write_text(json.dumps(result))
    return code


if __name__ == "__main__":
    sys.exit(main())
