"""The prediction of `compress-model roofline` beside what the engine takes.

    python -m benchmarks.runtime.roofline [400m] [--batches 1 8 64] [--threads 1]
    python -m benchmarks.runtime.roofline 400m --result out/int4-rtn [--dtype bf16]
    python -m benchmarks.runtime.roofline 400m --blocks 4 --clock cpu

400m is a Llama of that size with random weights; --result names what a recipe made of the model,
which takes its place, with the math of those who ask for none. Everything is predicted before a
text is served. Then texts that come at once are: `step` is the median of the steps in which every
one of them gets a token. Prompts that come alone follow. ratio: expected / measured. The result
goes to benchmarks/results, but for fewer blocks. With --clock cpu seconds are those of the
processor, for a machine that others use too.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import threads_suffix, write_result
from benchmarks.runtime.loaded import checkpoint
from benchmarks.runtime.setting import setting
from benchmarks.runtime.sides import Ours
from benchmarks.runtime.speed import DTYPES
from compress.runtime.engine.engine import Engine
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.sequences.limits import Limits
from compress.speed.load import LoadRequest, even_load, play, predict, speed_of
from compress.speed.rates import Calibrated, calibrate
from compress.speed.roofline import ceiling, compute_bound_batch, first_token_ceiling
from compress.speed.timer import Timer
from compress.speed.workload import decode_load

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PROMPT, STEPS = 64, 16
ALONE = (128, 512)
ROUNDS, TURNS = 3, 3


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` texts of one size that come at once."""

    batch: int
    prompt: int
    output: int

    def jobs(self) -> list[LoadRequest]:
        return even_load(self.batch, self.prompt, self.output, vocabulary=4096)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="400m", choices=["tale-6m", "400m"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--blocks", type=int, help="of 400m, for a quick try; nothing is stored")
    parser.add_argument("--result", type=Path, help="what a recipe made of the model")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=TURNS, help="to predict and to measure")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    asked = [_at_once(batch) for batch in options.batches]
    asked += [Case(1, prompt, 1) for prompt in ALONE if options.model == "400m"]
    with tempfile.TemporaryDirectory() as folder:
        model = options.result or checkpoint(options.model, Path(folder), options.blocks)
        ours = Ours(model, DTYPES[options.dtype])
        turns = [compare(ours, asked, CLOCKS[options.clock]) for _ in range(options.turns)]
    found = turns[0][0]
    cases = [middle(same) for same in zip(*(cases for _, cases in turns), strict=True)]
    result = {
        **setting("benchmarks.runtime.roofline"),
        "model": options.model,
        "blocks": options.blocks,
        "recipe": options.result and options.result.name,
        "dtype": options.dtype,
        "math": ours.how.math,
        "clock": options.clock,
        "turns": options.turns,
        "gigabytes_per_s": _short(found.machine.bandwidth / 1e9),
        "gigaflops_per_s": _short(found.machine.flops / 1e9),
        "weight_bytes": found.work.weight_bytes,
        "compute_bound_batch": _short(compute_bound_batch(found.work, found.machine)),
        "cases": cases,
        "furthest_ratio": max((x for case in cases for x in _ratios(case)), key=_apart),
    }
    if options.blocks:
        print(json.dumps(result, indent=1))
    else:
        write_result(_name(options), result)


def _name(options: argparse.Namespace) -> str:
    """Of the result, with what is not the usual."""
    parts = [
        "" if options.model == "400m" else f"_{options.model}",
        f"_{options.result.name}" if options.result else "",
        "" if options.dtype == "fp32" else f"_{options.dtype}",
        threads_suffix(options.threads),
    ]
    return "runtime_roofline" + "".join(parts)


def compare(
    ours: Ours, asked: Sequence[Case], clock: Callable[[], float]
) -> tuple[Calibrated, list[dict[str, Any]]]:
    """Predictions of all cases, then measurements of all."""
    timer = Timer(torch.device("cpu"), clock)
    found = calibrate(ours.weights, how=ours.how.arithmetic, timer=timer)
    expected = [
        figures(predict(found.work, found.rates, case.jobs(), reuse=False)) for case in asked
    ]
    warm = Case(1, PROMPT, 2).jobs()
    play(ours.engine(warm, reuse=False), warm, clock)
    cases = []
    for case, predicted in zip(asked, expected, strict=True):
        measured = _median(ours, case.jobs(), clock)
        cases.append({**asdict(case), **_at_best(found, case), **_beside(predicted, measured)})
    return found, cases


def middle(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of a case, of each figure the turn with the median ratio: memory that other machines share
    gave 41 to 52 GB/s to two threads, from one minute to the next."""
    found = dict(turns[0])
    for name, value in found.items():
        if isinstance(value, dict):
            by_ratio = sorted((turn[name] for turn in turns), key=lambda x: x["ratio"])
            found[name] = by_ratio[(len(turns) - 1) // 2]
    return found


def _at_once(batch: int) -> Case:
    """Outputs last for STEPS steps behind the last prompt."""
    reading = -(-batch * PROMPT // Limits().tokens_per_step)
    return Case(batch, PROMPT, reading + STEPS + 1)


def figures(times: Sequence[Sequence[float]]) -> dict[str, float]:
    """Seconds. step: the median of those in which all texts get a token."""
    found = {"first_token_p50_s": speed_of(times).first_p50}
    if len(times[0]) > 1:
        begin, end = max(own[0] for own in times), min(own[-1] for own in times)
        within = [at for at in times[0] if begin <= at <= end]
        found["step_s"] = statistics.median(b - a for a, b in pairwise(within))
        found["whole_s"] = max(own[-1] for own in times)
    return found


def _median(
    ours: Ours, jobs: Sequence[LoadRequest], clock: Callable[[], float]
) -> dict[str, float]:
    runs = [figures(play(_engine(ours, jobs), jobs, clock)) for _ in range(ROUNDS)]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _engine(ours: Ours, jobs: Sequence[LoadRequest]) -> Engine:
    """A new one as if it had served before. The system gives a page of the cache when it is first
    written, once: one text of tale-6m took 10.8 to 11.1 ms as a whole in a new engine, and 10.2 to
    10.4 where all pages had been written (medians of 15, 1 thread)."""
    engine = ours.engine(jobs, reuse=False)
    assert isinstance(engine.runner, LocalRunner), "it is in this process"
    for states in chain(*engine.runner.cache.states):
        states.zero_()
    return engine


def _beside(expected: dict[str, float], measured: dict[str, float]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "expected": _short(expected[name]),
            "measured": _short(measured[name]),
            "ratio": round(expected[name] / measured[name], 3),
        }
        for name in expected
    }


def _at_best(found: Calibrated, case: Case) -> dict[str, float]:
    """Of a step in which all texts get a token, and of a prompt that comes alone."""
    work, machine = found.work, found.machine
    step = ceiling(work, machine, decode_load(work, case.batch, case.prompt + case.output // 2))
    best = {"step_at_best_s": _short(step)} if case.output > 1 else {}
    if case.batch == 1:
        most = Limits().tokens_per_step
        first = first_token_ceiling(work, machine, case.prompt, most)
        best["first_token_at_best_s"] = _short(first)
    return best


def _ratios(case: dict[str, Any]) -> list[float]:
    return [value["ratio"] for value in case.values() if isinstance(value, dict)]


def _apart(ratio: float) -> float:
    return max(ratio, 1 / ratio)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
