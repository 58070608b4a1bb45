"""The engine beside transformers' `generate` in static batches of 8, taking turns.

    python -m benchmarks.runtime.speed tale-6m [--requests 1 8 64 256] [--rounds 3]
    python -m benchmarks.runtime.speed 400m --requests 1 8 64 --rounds 1

Same model, prompts, dtype and threads; greedy. Prompts and outputs are log-uniform in 16 to 256
tokens. 400m is a Llama of that size with random weights. The result goes to benchmarks/results.
tokens_per_cpu_s tells of a machine that others use too, where tokens_per_s varies with the load.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks import timing
from benchmarks.models import SHAPES, make
from benchmarks.processes import REPO, RESULTS
from benchmarks.runtime.load import make_load
from benchmarks.runtime.sides import Ours, Static
from benchmarks.runtime.timings import Timings, summary

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=["tale-6m", "400m"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=3, help="one more, not counted, comes first")
    parser.add_argument("--blocks", type=int, help="of 400m, where its 24 would take too long")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-warmup", action="store_true", help="count the first round, too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        result = {
            **timing.setting(),
            "transformers": version("transformers"),
            "model": options.model,
            "blocks": options.blocks,
            "dtype": options.dtype,
            "rounds": options.rounds,
            "cases": [],
        }
        for case in _measure(_model(options, Path(folder)), options):
            result["cases"].append(case)
            blocks = f"_{options.blocks}_blocks" if options.blocks else ""
            name = f"runtime_speed_{options.model}_{options.dtype}{blocks}.json"
            timing.write(str(RESULTS / name), result)


def _model(options: argparse.Namespace, folder: Path) -> Path:
    if options.model not in SHAPES:
        return REPO / "examples" / options.model
    shape = SHAPES[options.model]
    make(folder, replace(shape, blocks=options.blocks or shape.blocks), tokenizer=False)
    return folder


def _measure(model: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    dtype = DTYPES[options.dtype]
    sides = {"engine": Ours(model, dtype), "transformers": Static(model, dtype)}
    vocabulary = sides["engine"].decoder.spec.vocab
    for count in options.requests:
        jobs = make_load(count, vocabulary)
        runs: dict[str, list[Timings]] = {name: [] for name in sides}
        for number in range(options.rounds + (not options.no_warmup)):
            for name, side in sides.items():
                measured = side.serve(jobs)
                if number or options.no_warmup:
                    runs[name].append(measured)
        found = {name: _rounded(summary(of)) for name, of in runs.items()}
        yield {
            "requests": count,
            "prompt_tokens": sum(len(job.prompt) for job in jobs),
            "output_tokens": sum(job.output for job in jobs),
            **found,
            "ratio": round(_ratio(found, "tokens_per_s"), 2),
            "ratio_of_cpu": round(_ratio(found, "tokens_per_cpu_s"), 2),
        }


def _ratio(found: dict[str, dict[str, float]], name: str) -> float:
    return found["engine"][name] / found["transformers"][name]


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}


if __name__ == "__main__":
    main()
