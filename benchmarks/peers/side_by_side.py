"""Our GPTQ and llm-compressor's on the same rows, whole processes in turn.

    python -m benchmarks.peers.side_by_side [CASE ...] [--threads 1] [--batch-size 8]

A run is everything a user waits for: start of Python, imports, reading, calibration, solves,
writing. Either tool runs once before, uncounted: caches are warm and our C++ is compiled. We read
and tokenize the text; the peer is handed the same rows tokenized.

A solve is damping and factor of the Hessian and the column loop: `quantize_weight` of the peer,
whose scales an observer has chosen before, and our factor and loop with the search for scales.
"method" is all that happens between two forwards of a block: for the peer observer, solves and
storing, for us solves, plain rounding to compare with, and the errors of both.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers import cases
from benchmarks.peers.cases import CASES, Case, Done, Inputs
from benchmarks.processes import package_versions, setting, wait_until_quiet, write_result

# Read by one value each: (name in the result, value of a run).
MEASURES: dict[str, Callable[[Done], float]] = {
    "wall_s": lambda done: done.cost.wall_s,
    "cpu_s": lambda done: done.cost.cpu_s,
    "solve_wall_s": lambda done: done.solve["wall_s"],
    "solve_cpu_s": lambda done: done.solve["cpu_s"],
    "method_wall_s": lambda done: done.method["wall_s"],
    "method_cpu_s": lambda done: done.method["cpu_s"],
    "peak_rss_mb": lambda done: done.cost.peak_rss_bytes / 1e6,
}


def compare(case: Case, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run both tools in turn and put medians, ratios and bars together."""
    inputs = cases.prepare(case, work)
    tools: dict[str, Callable[[Inputs], Done]] = {
        "compress-model": cases.run_ours,
        "llm-compressor": partial(cases.run_peer, batch_size=options.batch_size),
    }
    done: dict[str, list[Done]] = {name: [] for name in tools}
    for number in range(options.rounds + 1):
        for name, tool in tools.items():
            wait_until_quiet(options.quiet)
            finished = tool(inputs)
            label = f"round {number}" if number else "warm-up"
            print(f"{case.name}, {label}: {name} {finished.cost.cpu_s:.1f} CPU-s", file=sys.stderr)
            if number:
                done[name].append(finished)
    medians = {name: median(runs) for name, runs in done.items()}
    ours, peer = medians.values()
    ratios = {name: round(peer[name] / ours[name], 2) for name in MEASURES}
    return {
        **setting("benchmarks.peers.side_by_side"),
        "versions": versions(),
        **cases.describe(case),
        "peer_batch_size": options.batch_size,
        "median": medians,
        "peer_over_ours": ratios,
        "bars": verdicts(case, ratios),
        "runs": {name: [one_run(run) for run in runs] for name, runs in done.items()},
    }


def median(runs: Sequence[Done]) -> dict[str, float]:
    return {
        name: round(statistics.median(read(run) for run in runs), 3)
        for name, read in MEASURES.items()
    }


def verdicts(case: Case, ratios: dict[str, float]) -> dict[str, Any]:
    """Every bar with what was reached; memory is to be no more than the peer's."""
    reached = {"run": ratios["cpu_s"], "solves": ratios["solve_cpu_s"]}
    bars = {
        f"{what}, CPU seconds": {"wanted": least, "reached": reached[what]}
        for what, least in case.bars.items()
    }
    bars["peak memory"] = {"wanted": 1.0, "reached": ratios["peak_rss_mb"]}
    return {name: {**bar, "met": bar["reached"] >= bar["wanted"]} for name, bar in bars.items()}


def one_run(run: Done) -> dict[str, Any]:
    values = {name: round(read(run), 3) for name, read in MEASURES.items()}
    others = round(run.cost.others, 3)
    return {**values, "machine_used_by_others": others}


def versions() -> dict[str, Any]:
    ours = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    return {
        "compress-model": package_versions(sys.executable, ours),
        "llm-compressor": package_versions(cases.peer_python(), cases.PACKAGES),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(c.name for c in CASES))
    parser.add_argument("--threads", type=int, help="for both; as torch chooses when left out")
    parser.add_argument("--batch-size", type=int, default=1, help="of the peer; 1 is its default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="folder for models and results (kept)")
    parser.add_argument("--quiet", type=float, default=0.1, help="start when others use less")
    options = parser.parse_args()
    wanted = options.cases or [case.name for case in CASES]
    if unknown := set(wanted) - {case.name for case in CASES}:
        parser.error(f"no case {sorted(unknown)}; there are {[case.name for case in CASES]}")
    if options.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        for case in CASES:
            if case.name in wanted:
                result = compare(case, options.work or Path(scratch), options)
                write_result(f"peers_llmcompressor_{case.name}{suffix(options)}", result)


def suffix(options: argparse.Namespace) -> str:
    """What of the settings is not the default, for the name of the result."""
    threads = "" if options.threads is None else f"_threads-{options.threads}"
    return threads + ("" if options.batch_size == 1 else f"_batch-{options.batch_size}")


if __name__ == "__main__":
    main()
