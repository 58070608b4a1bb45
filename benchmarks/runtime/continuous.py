"""transformers' own continuous batching as a side of the benchmark."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.runtime.timings import Timings
from compress.speed.load import LoadRequest

# Seconds without a finished request after which its thread is taken for dead.
PATIENCE = 600


class Continuous:
    """Its manager, fed with the whole load at once; the times of tokens are those it records."""

    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation="sdpa"
        )
        self.model.generation_config.do_sample = False

    def serve(self, jobs: Sequence[LoadRequest]) -> Timings:
        from transformers import ContinuousBatchingConfig

        tokens = sum(len(job.prompt) + job.output for job in jobs)
        # Room for all, so that it never stalls for want of memory; one block of 256 a request more.
        settings = ContinuousBatchingConfig(
            num_blocks=tokens // 256 + len(jobs) + 1, max_batch_tokens=512
        )
        with self.model.continuous_batching_context_manager(
            continuous_batching_config=settings
        ) as manager:
            start, cpu = time.perf_counter(), time.process_time()
            for index, job in enumerate(jobs):
                manager.add_request(
                    list(job.prompt),
                    request_id=str(index),
                    max_new_tokens=job.output,
                    record_timestamps=True,
                    eos_token_id=-1,
                )
            found = dict(self._result(manager) for _ in jobs)
            cpu = time.process_time() - cpu
        return Timings(
            [[at - start for at in found[str(index)]] for index in range(len(jobs))], cpu
        )

    def _result(self, manager: Any) -> tuple[str, list[float]]:
        """The next finished request, and when its tokens came."""
        result = manager.get_result(timeout=PATIENCE)
        if result is None or result.error is not None:
            raise RuntimeError(f"transformers' continuous batching failed: {result!r:.500}")
        return result.request_id, result.timestamps
