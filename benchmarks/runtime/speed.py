"""The engine beside transformers and vLLM on one load, taking turns.

    python -m benchmarks.runtime.speed tale-6m [--requests 1 8 64 256] [--rounds 3]
    python -m benchmarks.runtime.speed 400m --requests 1 8 64 --rounds 1 --sides engine vllm

Same model, prompts, dtype and threads; greedy. Prompts and outputs are log-uniform in 16 to 256
tokens. 400m is a Llama of that size with random weights. Sides: `engine`; `static`, transformers'
`generate` in batches of 8; `continuous`, transformers' own continuous batching; `vllm`, real vLLM
on CPU, compiled, and `vllm-eager` (benchmarks/peers/README.md has its environment). The result goes
to benchmarks/results, under a name of its own where the sides are not the first four, or threads
several; loads of other numbers of requests stay there, if they were measured on the same processor
with the same programs. tokens_per_cpu_s tells of a machine that others use too, where tokens_per_s
varies with the load. ratios are the engine's throughput over that of each side. `predicted` is what
the roofline says of the engine, calibrated just before (docs/speed.md), with measured / predicted.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.processes import RESULTS, threads_suffix, write_result
from benchmarks.runtime.continuous import Continuous
from benchmarks.runtime.load import LONGEST, make_load
from benchmarks.runtime.loaded import checkpoint
from benchmarks.runtime.setting import setting
from benchmarks.runtime.sides import Ours, Static
from benchmarks.runtime.timings import Timings, summary
from benchmarks.runtime.vllm_side import Vllm
from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.runtime.forms.form import Arithmetic
from compress.speed.load import LoadRequest, predict
from compress.speed.rates import calibrate

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIDES = ("engine", "static", "continuous", "vllm", "vllm-eager")
RATES = ("tokens_per_s", "tokens_per_cpu_s")
# What two loads must have in common to stand in one result, and what each has of its own.
ALIKE = ("cpu", "threads", "torch", "transformers", "vllm", "model", "blocks", "dtype")
MADE = ("command", "date", "commit", "load_average", "rounds")


class Side(Protocol):
    def serve(self, jobs: Sequence[LoadRequest]) -> Timings: ...


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=["tale-6m", "400m"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES[:4])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=3, help="one more, not counted, comes first")
    parser.add_argument("--blocks", type=int, help="of 400m, where its 24 would take too long")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-warmup", action="store_true", help="count the first round, too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = checkpoint(options.model, Path(folder), options.blocks)
        sides = _sides(model, options, Path(folder), stack)
        how = {
            **setting("benchmarks.runtime.speed"),
            "vllm": next((s.version for s in sides.values() if isinstance(s, Vllm)), None),
            "model": options.model,
            "blocks": options.blocks,
            "dtype": options.dtype,
            "rounds": options.rounds,
        }
        name = _name(options)
        for case in _measure(model, sides, options):
            path = RESULTS / f"{name}.json"
            stored = json.loads(path.read_text()) if path.exists() else None
            write_result(name, merged(stored, how, case))


def merged(
    stored: Mapping[str, Any] | None, how: Mapping[str, Any], case: Mapping[str, Any]
) -> dict[str, Any]:
    """A result with one more load, which takes the place of one with as many requests. Others stay
    where they were measured alike; each says when and by which command."""
    made = {key: how[key] for key in MADE}
    kept = []
    if stored is not None and all(stored.get(key) == how[key] for key in ALIKE):
        before = {key: stored[key] for key in MADE}
        kept = [{**before, **x} for x in stored["cases"] if x["requests"] != case["requests"]]
    cases = sorted([*kept, {**made, **case}], key=lambda x: x["requests"])
    return {**how, "cases": cases}


def _name(options: argparse.Namespace) -> str:
    """Of the result, with what is not as usual: blocks, sides and threads."""
    parts = ["runtime_speed", options.model, options.dtype]
    parts += [f"{options.blocks}_blocks"] if options.blocks else []
    parts += [] if options.sides == SIDES[:4] else options.sides[1:]
    return "_".join(parts) + threads_suffix(options.threads)


def _sides(
    model: Path, options: argparse.Namespace, folder: Path, stack: ExitStack
) -> dict[str, Side]:
    dtype = DTYPES[options.dtype]

    def vllm(mode: str) -> Vllm:
        log = folder / f"{mode}.log"
        side = Vllm(model, dtype, options.threads, 2 * LONGEST, mode, log)
        stack.callback(side.close)
        return side

    make = {
        "engine": lambda: Ours(model, dtype),
        "static": lambda: Static(model, dtype),
        "continuous": lambda: Continuous(model, dtype),
        "vllm": lambda: vllm("compiled"),
        "vllm-eager": lambda: vllm("eager"),
    }
    return {name: make[name]() for name in options.sides}


def _measure(
    model: Path, sides: Mapping[str, Side], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    engine = sides["engine"]
    assert isinstance(engine, Ours)
    for count in options.requests:
        jobs = make_load(count, engine.vocabulary)
        expected = _predicted(model, options, jobs)
        runs: dict[str, list[Timings]] = {name: [] for name in sides}
        for number in range(options.rounds + (not options.no_warmup)):
            for name, side in sides.items():
                measured = side.serve(jobs)
                assert [len(times) for times in measured.tokens] == [job.output for job in jobs]
                if number or options.no_warmup:
                    runs[name].append(measured)
        found = {name: _rounded(summary(of)) for name, of in runs.items()}
        predicted = {k: v for k, v in _rounded(expected).items() if k != "tokens_per_cpu_s"}
        yield {
            "requests": count,
            "prompt_tokens": sum(len(job.prompt) for job in jobs),
            "output_tokens": sum(job.output for job in jobs),
            **found,
            "predicted": predicted,
            "measured_over_predicted": {
                k: round(found["engine"][k] / value, 2) for k, value in predicted.items()
            },
            "ratios": {name: _ratios(found, name) for name in sides if name != "engine"},
        }


def _predicted(
    model: Path, options: argparse.Namespace, jobs: Sequence[LoadRequest]
) -> dict[str, float]:
    weights = open_weights(Checkpoint.open(model))
    found = calibrate(weights, how=Arithmetic.here(DTYPES[options.dtype], "cpu"))
    times = predict(found.work, found.rates, jobs)
    return summary([Timings(times, cpu_s=max(map(max, times)))])


def _ratios(found: Mapping[str, Mapping[str, float]], name: str) -> dict[str, float]:
    return {rate: round(found["engine"][rate] / found[name][rate], 2) for rate in RATES}


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}


if __name__ == "__main__":
    main()
