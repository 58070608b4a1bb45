"""Room in the cache that running requests hold and do not fill, over a whole load on tale-6m.

    python -m benchmarks.runtime.kv_waste [--requests 64]

After every step: positions in the blocks that are held, against positions computed. A text fills
its last block by half on average, (16 - 1) / 2 = 7.5 positions short, so the bound is 7.5 / mean
length + 1 %. Nothing is timed. The result goes to benchmarks/results.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.processes import REPO, write_result
from benchmarks.runtime.load import make_load
from benchmarks.runtime.setting import setting
from benchmarks.runtime.sides import BLOCK, Ours
from compress.runtime.engine.engine import Engine

BLOCKS = (8, BLOCK, 32)


@dataclass(slots=True)
class Held:
    """Sums over the steps of a load: sequences that ran, positions held, positions computed."""

    sequences: int = 0
    held: int = 0
    computed: int = 0

    def note(self, engine: Engine) -> None:
        (pool,) = engine.tables.pools
        running = engine.scheduler.running
        self.sequences += len(running)
        self.held += (pool.count - 1 - pool.free) * pool.block_size
        self.computed += sum(sequence.computed for sequence in running)

    @property
    def mean_length(self) -> float:
        return self.computed / self.sequences

    @property
    def waste(self) -> float:
        """Of what is computed."""
        return self.held / self.computed - 1


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    options = parser.parse_args(arguments)
    side = Ours(REPO / "examples" / "tale-6m", torch.float32)
    result = {
        **setting("benchmarks.runtime.kv_waste"),
        "model": "tale-6m",
        "requests": options.requests,
        "blocks": [_case(side, options.requests, block) for block in BLOCKS],
    }
    write_result("runtime_kv_waste", result)


def _case(side: Ours, requests: int, block: int) -> dict[str, Any]:
    held = Held()
    jobs = make_load(requests, side.vocabulary)
    side.run(side.engine(jobs, block), jobs, held.note)
    return {
        "block": block,
        "mean_length": round(held.mean_length, 2),
        "waste": round(held.waste, 5),
        "bound": round((block - 1) / 2 / held.mean_length + 0.01, 5),
    }


if __name__ == "__main__":
    main()
