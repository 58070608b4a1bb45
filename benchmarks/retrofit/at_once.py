"""How many texts run at once in the same memory for keys and values, before and after.

    python -m benchmarks.retrofit.at_once RESULT [--mebibytes 32]

The engine opens tale-6m and RESULT, a retrofit of it, each with a cache of as many tokens as the
memory holds, and serves more texts than fit, all of one length and none alike. What runs is counted
by the engine: the most texts that had blocks at once, and the mean over all steps in which others
waited. The result goes to benchmarks/results/retrofit_at_once.json.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import write_result
from benchmarks.runtime.setting import setting
from benchmarks.structure.points import SOURCE
from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.runtime.decoder.kv import KVCache, cache_bytes
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.loading.open_engine import Opening, open_engine
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import Request, Sampling
from compress.speed.load import even_load

PROMPT, OUTPUT, BLOCK = 64, 64, 16
TIMES = 6  # as many texts as fit whole


def served(folder: Path, budget: int) -> dict[str, Any]:
    """budget: bytes for keys and values."""
    weights = open_weights(Checkpoint.open(folder))
    token = cache_bytes((x.sizes.cache() for x in weights.spec.blocks), torch.float32)
    limits = Limits(sequences=4096)
    blocks = budget // (token * BLOCK) - 1  # one more is there for padding
    opening = Opening(limits=limits, block_size=BLOCK, cache_tokens=blocks * BLOCK, reuse=False)
    engine, _ = open_engine(weights, opening)
    assert isinstance(engine.runner, LocalRunner)
    cache = engine.runner.cache
    assert isinstance(cache, KVCache)
    count = TIMES * budget // (token * (PROMPT + OUTPUT))
    for i, job in enumerate(even_load(count, PROMPT, OUTPUT, weights.spec.vocab)):
        engine.add(Request(str(i), job.prompt, Sampling(max_tokens=OUTPUT, ignore_eos=True)))
    running = []
    while not engine.idle:
        engine.step()
        if engine.scheduler.waiting:
            running.append(len(engine.scheduler.running))
    held = [x for parts in (*cache.states, *cache.scales) for x in parts if x is not None]
    return {
        "bytes_per_token": cache.bytes_per_token,
        "allocated_bytes": sum(x.nbytes for x in held),
        "texts": count,
        "most_at_once": engine.stats.running,
        "mean_while_others_wait": round(statistics.fmean(running), 2),
        "steps": engine.stats.steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--mebibytes", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    budget = options.mebibytes << 20
    sides = {"source": served(SOURCE, budget), "result": served(options.result, budget)}
    names = ("most_at_once", "mean_while_others_wait")
    found = {
        **setting("benchmarks.retrofit.at_once"),
        "model": "tale-6m",
        "dtype": "fp32",
        "budget_bytes": budget,
        "prompt": PROMPT,
        "output": OUTPUT,
        **sides,
        "times": {n: round(sides["result"][n] / sides["source"][n], 2) for n in names},
    }
    write_result("retrofit_at_once", found)


if __name__ == "__main__":
    main()
