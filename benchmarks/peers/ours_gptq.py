"""`compress-model` as a whole process, with a clock around the solves.

    python -m benchmarks.peers.ours_gptq CLOCK run RECIPE --model MODEL --out OUT

CLOCK: JSON file for the seconds in "solve" (damping and factor of the Hessian, column loop with its
scale search) and in "method" (solves, plain rounding beside them, the errors of both). The rest of
the line is the command line's.
"""

import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.peers.clock import Spent, clocked
from compress import verbs
from compress.cli.main import main as command_line
from compress.cli.process import leave


def set_clocks(spent: dict[str, Spent]) -> None:
    """Put clocks around the gptq method and around its two steps that make a solve."""
    from compress.methods import METHODS

    solving: Any = import_module("compress.passes.quantize.solve")
    gptq = METHODS["gptq"]
    module: Any = sys.modules[gptq.quantize.__module__]
    for step in ("factorise", "_compensate"):
        setattr(module, step, clocked(getattr(module, step), spent["solve"]))
    timed = replace(gptq, quantize=clocked(gptq.quantize, spent["method"]))
    solving.METHODS = {**METHODS, "gptq": timed}


def main() -> NoReturn:
    clock, *line = sys.argv[1:]
    spent: dict[str, Spent] = {
        name: {"calls": 0, "wall_s": 0.0, "cpu_s": 0.0} for name in ("solve", "method")
    }

    def run(*args: Any, **kwargs: Any) -> Any:
        # Only now: the command line sets the process up before torch is imported.
        set_clocks(spent)
        from compress.runs import run as main_run

        return main_run.run(*args, **kwargs)

    verbs.run = run
    code = command_line(line)
    assert code or all(part["calls"] for part in spent.values()), f"a clock was not run: {spent}"
    Path(clock).write_text(json.dumps(spent))
    leave(code)


if __name__ == "__main__":
    main()
