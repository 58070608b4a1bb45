"""The first token of a prompt whose beginning is cached, beside that of one which is not.

    python -m benchmarks.runtime.prefix tale-6m [--shared 400]
    python -m benchmarks.runtime.prefix 400m [--shared 1024]

Both engines serve the same prompts one at a time, taking turns: `shared` tokens, the same in all,
and 16 of their own. One keeps prefixes and has seen the shared tokens; the other does not keep any.
`predicted` is what the roofline says (docs/speed.md). The result goes to benchmarks/results.
"""

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import write_result
from benchmarks.runtime.loaded import checkpoint
from benchmarks.runtime.setting import setting
from benchmarks.runtime.sides import BLOCK, Ours
from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.runtime.engine.engine import Engine
from compress.runtime.sequences.limits import Limits
from compress.speed.load import LoadRequest
from compress.speed.rates import calibrate
from compress.speed.roofline import expected, first_token
from compress.speed.workload import prompt_load

OWN = 16


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=["tale-6m", "400m"])
    parser.add_argument("--shared", type=int, help="tokens; 400 for tale-6m, 1024 for 400m")
    parser.add_argument("--blocks", type=int, help="of 400m, where its 24 would take too long")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    shared = options.shared or {"tale-6m": 400, "400m": 1024}[options.model]
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(options.model, Path(folder), options.blocks)
        side = Ours(model, torch.float32)
        predicted = _predicted(model, shared)
    result = {
        **setting("benchmarks.runtime.prefix"),
        "model": options.model,
        "blocks": options.blocks,
        "shared_tokens": shared,
        "own_tokens": OWN,
        "rounds": options.rounds,
        "predicted": predicted,
        **_measure(side, shared, options.rounds),
    }
    blocks = f"_{options.blocks}_blocks" if options.blocks else ""
    write_result(f"runtime_prefix_{options.model}{blocks}", result)


def _predicted(model: Path, shared: int) -> dict[str, float]:
    """Cached: only a prompt's own tokens are computed, in the bytes and products of a step."""
    weights = open_weights(Checkpoint.open(model))
    found = calibrate(weights)
    cold = first_token(found.work, found.rates, shared + OWN, Limits().tokens_per_step)
    step = prompt_load(found.work, shared, shared + OWN, wanted=1)
    cached = expected(found.work, found.rates, step).total
    return {
        "ttft_cold_s": round(cold, 5),
        "ttft_cached_s": round(cached, 5),
        "ratio": round(cold / cached, 2),
    }


def _measure(side: Ours, shared: int, rounds: int) -> dict[str, Any]:
    jobs = _jobs(rounds + 1, shared, side.vocabulary)
    engines = {"cold": side.engine(jobs, BLOCK, reuse=False), "cached": side.engine(jobs, BLOCK)}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    hits: list[int] = []
    for number, job in enumerate(jobs):  # the first fills the cache and is not counted
        for name, engine in engines.items():
            before = engine.stats.hit
            first = _first_token(side, engine, job)
            if number:
                seconds[name].append(first)
                hits += [engine.stats.hit - before] if name == "cached" else []
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "cached_tokens": hits,
        **{f"ttft_{name}_s": round(value, 5) for name, value in medians.items()},
        "ratio": round(medians["cold"] / medians["cached"], 2),
    }


def _jobs(count: int, shared: int, vocabulary: int) -> list[LoadRequest]:
    generator = random.Random(0)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(generator.randrange(1, vocabulary) for _ in range(length))

    stem = ids(shared)
    return [LoadRequest(stem + ids(OWN), 1) for _ in range(count)]


def _first_token(side: Ours, engine: Engine, job: LoadRequest) -> float:
    ((seconds,),) = side.run(engine, [job]).tokens
    return seconds


if __name__ == "__main__":
    main()
