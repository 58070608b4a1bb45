"""What serves a load: the engine, and transformers' `generate` in static batches."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.runtime.timings import Timings
from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.kv import KVCache
from compress.runtime.engine.engine import Engine
from compress.runtime.engine.refusals import ModelFacts
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.sequences.request import Request, Sampling
from compress.speed.load import LoadRequest

BATCH, BLOCK = 8, 16
Watch = Callable[[Engine], None]


class Ours:
    """kv: how keys and values are stored; in the dtype of the model where it is None."""

    def __init__(self, model: Path, dtype: torch.dtype, kv: torch.dtype | None = None) -> None:
        self.decoder = Decoder.load(open_weights(Checkpoint.open(model)), dtype=dtype)
        self.kv = dtype if kv is None else kv

    def serve(
        self, jobs: Sequence[LoadRequest], after: Watch | None = None, block: int = BLOCK
    ) -> Timings:
        return self.run(self.engine(jobs, block), jobs, after)

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
        how, spec = self.decoder.how, self.decoder.spec
        blocks = 1 + sum(-(-(len(job.prompt) + job.output) // block) + 1 for job in jobs)
        device = self.decoder.device
        cache = KVCache(how, [blocks] * len(how.windows), block, dtype=self.kv, device=device)
        facts = ModelFacts(context=spec.context or 4096, vocabulary=spec.vocab)
        return Engine(LocalRunner(self.decoder, cache), facts, reuse=reuse)


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
