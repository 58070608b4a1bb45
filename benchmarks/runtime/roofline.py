"""The prediction of `compress-model roofline` beside what the engine takes.

    python -m benchmarks.runtime.roofline [400m] [--batches 1 8 64] [--threads 1]
    python -m benchmarks.runtime.roofline 400m --blocks 4 --clock cpu

400m is a Llama of that size with random weights. Everything is predicted before the weights are
read. Then texts that come at once are served: `step` is the median of the steps in which every one
of them gets a token. Prompts that come alone follow. ratio: expected / measured. The result goes to
benchmarks/results, but for fewer blocks. With --clock cpu seconds are those of the processor, for a
machine that others use too.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import timing
from benchmarks.processes import RESULTS
from benchmarks.runtime.loaded import checkpoint
from benchmarks.runtime.sides import Ours
from compress.checkpoint import Checkpoint
from compress.evaluation.load import Job, even_load, play, predict, speed_of
from compress.evaluation.rates import Calibrated, calibrate
from compress.evaluation.roofline import ceiling, compute_bound_batch, first_token_ceiling
from compress.evaluation.timer import Timer
from compress.evaluation.workload import decode_load
from compress.formats import open_weights
from compress.runtime.limits import Limits

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PROMPT, STEPS = 64, 16
ALONE = (128, 512)
ROUNDS = 3


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="400m", choices=["tale-6m", "400m"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--blocks", type=int, help="of 400m, for a quick try; nothing is stored")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    clock = CLOCKS[options.clock]
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(options.model, Path(folder), options.blocks)
        weights = open_weights(Checkpoint.open(model))
        found = calibrate(weights, timer=Timer(torch.device("cpu"), clock))
        loads = {batch: _load(batch, weights.spec.vocab) for batch in options.batches}
        loads |= {-size: even_load(1, size, 1, weights.spec.vocab) for size in ALONE}
        expected = {
            key: _figures(predict(found.work, found.rates, jobs, reuse=False))
            for key, jobs in loads.items()
        }
        ours = Ours(model, torch.float32)
        play(ours.engine(loads[-ALONE[0]], reuse=False), loads[-ALONE[0]])
        measured = {key: _median(ours, jobs, clock) for key, jobs in loads.items()}
    rows = {key: _beside(expected[key], measured[key]) for key in loads}
    best = {key: _at_best(found, key) for key in loads}
    result = {
        **timing.setting(),
        "model": options.model,
        "blocks": options.blocks,
        "dtype": "fp32",
        "clock": options.clock,
        "gigabytes_per_s": _short(found.machine.bandwidth / 1e9),
        "gigaflops_per_s": _short(found.machine.flops / 1e9),
        "weight_bytes": found.work.weight_bytes,
        "compute_bound_batch": _short(compute_bound_batch(found.work, found.machine)),
        "at_once": [{"batch": k, "step_at_best_s": best[k], **rows[k]} for k in loads if k > 0],
        "alone": [{"prompt": -k, "at_best_s": best[k], **rows[k]} for k in loads if k < 0],
        "most_apart": max(
            max(x["ratio"], 1 / x["ratio"]) for r in rows.values() for x in r.values()
        ),
    }
    name = "runtime_roofline.json" if options.model == "400m" else "runtime_roofline_tale-6m.json"
    timing.write(None if options.blocks else str(RESULTS / name), result)


def _load(batch: int, vocabulary: int) -> list[Job]:
    """Outputs last for STEPS steps behind the last prompt."""
    reading = -(-batch * PROMPT // Limits().tokens_per_step)
    return even_load(batch, PROMPT, reading + STEPS + 1, vocabulary)


def _figures(times: Sequence[Sequence[float]]) -> dict[str, float]:
    """Seconds. step: while all texts are written. times: of each text, of each of its tokens."""
    found = {"first_token_p50_s": speed_of(times).first_p50}
    if len(times[0]) > 1:
        begin, end = max(own[0] for own in times), min(own[-1] for own in times)
        within = [at for at in times[0] if begin <= at <= end]
        found["step_s"] = statistics.median(b - a for a, b in pairwise(within))
        found["whole_s"] = max(own[-1] for own in times)
    return found


def _median(ours: Ours, jobs: Sequence[Job], clock: Any) -> dict[str, float]:
    runs = [_figures(play(ours.engine(jobs, reuse=False), jobs, clock)) for _ in range(ROUNDS)]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _beside(expected: dict[str, float], measured: dict[str, float]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "expected": _short(expected[name]),
            "measured": _short(measured[name]),
            "ratio": round(expected[name] / measured[name], 3),
        }
        for name in expected
    }


def _at_best(found: Calibrated, key: int) -> float:
    """Of a step of `key` texts, or of a prompt of -key tokens."""
    work, machine = found.work, found.machine
    if key < 0:
        return _short(first_token_ceiling(work, machine, -key, Limits().tokens_per_step))
    return _short(ceiling(work, machine, decode_load(work, key, PROMPT + STEPS // 2)))


def _short(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
