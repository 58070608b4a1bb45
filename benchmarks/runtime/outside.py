"""How much of a step is outside of compiled code: processor time of the engine's thread.

    python -m benchmarks.runtime.outside --model ../shared/models/tale-6m

Greedy texts, one or more at once, each of which gets a token a step. `one call` is the program of
the decoder; what is left of a step is scheduling, block tables, detokenisation and events. A tenth
of the steps took the first figure or less.
"""

import argparse
import time
from pathlib import Path
from unittest.mock import patch

import torch

from compress import Sampling
from compress.runtime.engine.engine import Engine
from compress.runtime.sequences.request import Request
from compress.verbs import open_model
from compress_kernels.cpu.program import Program

PROMPT, OUTPUT, ROUNDS = 25, 200, 8


def steps(engine: Engine, texts: int) -> list[tuple[float, float]]:
    """Seconds of each step that adds a token to every text, and of its program alone."""
    clock, inside = time.thread_time, [0.0]
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
            found.append((clock() - start, inside[0]))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine = open_model(options.model).engine
    for texts in options.texts:
        rounds = [step for _ in range(ROUNDS) for step in steps(engine, texts)]
        whole, called = torch.tensor(rounds, dtype=torch.float64).mul(1e6).unbind(1)
        print(f"{texts} texts, µs: a tenth, median")
        for name, taken in (("step", whole), ("one call", called), ("outside", whole - called)):
            print(f"  {name:9} {taken.quantile(0.1):8.1f} {taken.median():8.1f}")
