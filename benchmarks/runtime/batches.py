"""Batches of texts of one length that begin together, through several sides in turn."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.export.generate import PAUSE
from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.runtime.loading.math import settled_math
from compress.runtime.loading.open_engine import Opening, open_engine
from compress.runtime.sequences.request import Request, Sampling
from compress_kernels.panels import Math

CACHE_TOKENS = 1 << 14
Prompts = list[list[int]]
# Prompts and tokens of output -> `first_s` until all texts have their first token, `rest_s` and
# processor seconds `cpu_s` from there to the last, and `more` tokens meanwhile.
Serve = Callable[[Prompts, int], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Batch:
    """texts, and tokens of each: read and written."""

    texts: int
    prompt: int
    output: int

    @property
    def prompts(self) -> Prompts:
        generator = torch.Generator().manual_seed(0)
        return list(torch.randint(5, 4000, (self.texts, self.prompt), generator=generator).tolist())


def engine_side(
    model: Path, math: Math | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Serve, Math]:
    """And the math that it opens with: None for what users get who ask for none."""
    weights = open_weights(Checkpoint.open(model))
    math = settled_math(weights, math, dtype, "cpu")
    how = Opening(dtype, math=math, reuse=False, cache_tokens=CACHE_TOKENS)
    engine, _ = open_engine(weights, how)

    def serve(prompts: Prompts, output: int) -> dict[str, float]:
        start = time.perf_counter()
        for number, ids in enumerate(prompts):
            sampling = Sampling(max_tokens=output, ignore_eos=True)
            engine.add(Request(str(number), tuple(ids), sampling))
        waiting, more = {str(number) for number in range(len(prompts))}, len(prompts) * output
        while waiting:
            for update in engine.step():
                waiting -= {update.id} if update.tokens else set()
                more -= len(update.tokens)
        first, cpu = time.perf_counter(), time.process_time()
        while not engine.idle:
            engine.step()
        rest, spent = time.perf_counter() - first, time.process_time() - cpu
        return {"first_s": first - start, "rest_s": rest, "cpu_s": spent, "more": more}

    return serve, math


def in_turn(sides: Mapping[str, Serve], batch: Batch, rounds: int) -> dict[str, dict[str, Any]]:
    """Tokens a second of each side, medians of the rounds; one more, not counted, comes first.

    decode: behind the first of all texts, decode_by_cpu: by processor time. prefill: of prompts.
    """
    prompts = batch.prompts
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            time.sleep(PAUSE)  # threads of the side before may still spin
            found = sides[name](prompts, batch.output)
            if number:
                runs[name].append(found)
    return {name: _rates(each, batch) for name, each in runs.items()}


def _rates(runs: Sequence[Mapping[str, float]], batch: Batch) -> dict[str, Any]:
    found = {
        "decode": median(x["more"] / x["rest_s"] for x in runs),
        "decode_by_cpu": median(x["more"] / x["cpu_s"] for x in runs),
        "prefill": median(batch.texts * batch.prompt / x["first_s"] for x in runs),
    }
    return {name: float(f"{rate:.4g}") for name, rate in found.items()}
