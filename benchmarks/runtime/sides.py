"""What serves a load: the engine, and transformers' `generate` in static batches."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.runtime.timings import Timings
from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.runtime.engine.engine import Engine
from compress.runtime.loading.math import settled_math
from compress.runtime.loading.open_engine import Opening, open_engine
from compress.runtime.sequences.request import Request, Sampling
from compress.speed.load import LoadRequest

BATCH, BLOCK = 8, 16
Watch = Callable[[Engine], None]


class Ours:
    """kv: how keys and values are stored; in the dtype of the model where it is None. Products are
    as for those who ask for no math.

    Loads that are served one after another share an engine, as with the other sides; it keeps no
    prefixes, as they repeat."""

    def __init__(self, model: Path, dtype: torch.dtype, kv: torch.dtype | None = None) -> None:
        self.weights = open_weights(Checkpoint.open(model))
        math = settled_math(self.weights, None, dtype, "cpu")
        self.how = Opening(dtype, kv_dtype=kv, math=math)
        self.kept, _ = open_engine(self.weights, replace(self.how, reuse=False))

    @property
    def vocabulary(self) -> int:
        return self.weights.spec.vocab

    def serve(self, jobs: Sequence[LoadRequest]) -> Timings:
        return self.run(self.kept, jobs)

    def run(
        self, engine: Engine, jobs: Sequence[LoadRequest], after: Watch | None = None
    ) -> Timings:
        """after: looks at the engine behind each step."""
        times: dict[str, list[float]] = {str(i): [] for i in range(len(jobs))}
        start, cpu = time.monotonic(), time.process_time()
        for i, job in enumerate(jobs):
            sampling = Sampling(max_tokens=job.output, ignore_eos=True)
            engine.add(Request(str(i), job.prompt, sampling))
        while not engine.idle:
            updates, now = engine.step(), time.monotonic() - start
            for update in updates:
                times[update.id] += [now] * len(update.tokens)
            if after is not None:
                after(engine)
        return Timings(list(times.values()), time.process_time() - cpu)

    def engine(
        self, jobs: Sequence[LoadRequest], block: int = BLOCK, *, reuse: bool = True
    ) -> Engine:
        """A new one with room for all these, so that nothing is left of the last load."""
        blocks = sum(-(-(len(job.prompt) + job.output) // block) + 1 for job in jobs)
        how = replace(self.how, cache_tokens=blocks * block, block_size=block, reuse=reuse)
        engine, _ = open_engine(self.weights, how)
        return engine


class Static:
    """Batches of 8 in the order of the load, filled on the left; each runs until its longest output
    is done. Only tokens that were asked for count."""

    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def serve(self, jobs: Sequence[LoadRequest]) -> Timings:
        tokens: list[list[float]] = []
        start, cpu = time.monotonic(), time.process_time()
        for first in range(0, len(jobs), BATCH):
            batch = jobs[first : first + BATCH]
            steps = self._batch(batch, start)
            tokens += [steps[: job.output] for job in batch]
        return Timings(tokens, time.process_time() - cpu)

    def _batch(self, jobs: Sequence[LoadRequest], start: float) -> list[float]:
        """When each token of the batch was there."""
        width = max(len(job.prompt) for job in jobs)
        ids = torch.zeros(len(jobs), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(jobs):
            ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, width - len(job.prompt) :] = 1
        steps: list[float] = []

        def note(input_ids: Any, scores: Any, **_: Any) -> Any:
            steps.append(time.monotonic() - start)
            return torch.zeros(len(jobs), dtype=torch.bool)

        most = max(job.output for job in jobs)
        self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=most,
            min_new_tokens=most,
            do_sample=False,
            stopping_criteria=[note],
        )
        return steps
