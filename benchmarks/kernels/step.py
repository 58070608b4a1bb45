"""A step of the decoder in one call, against op by op, and against its compiled code alone.

    python benchmarks/kernels/step.py --model ../shared/models/tale-6m \\
        --output benchmarks/results/kernel_step.json

Each text has 32 tokens in the cache and gets one more. `ceiling compiled` is the same program with
what it is given already written down: what a step without Python would take.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import timing

from compress.runtime.decoder.one_call import OneCallDecoder
from compress.runtime.engine.batch import FlatBatch, TextChunk, build_batch
from compress.runtime.engine.runner import LocalRunner
from compress.verbs import open_model

TEXTS = (1, 8, 64)
SEEN = 32


def batch_of(texts: int, decoder: OneCallDecoder) -> FlatBatch:
    """One token of each text, behind SEEN others."""
    size, groups = decoder.cache.block_size, len(decoder.cache.groups)
    each = SEEN // size + 1
    chunks = [
        TextChunk([5 + i], SEEN, SEEN, (range(1 + i * each, 1 + (i + 1) * each),) * groups, SEEN)
        for i in range(texts)
    ]
    return build_batch(chunks, size, decoder.multiple)


def step(texts: int, decoder: OneCallDecoder) -> timing.Cases:
    batch = batch_of(texts, decoder)
    decoder.forward(batch, decoder.cache)
    return {
        "one call": lambda: decoder.forward(batch, decoder.cache),
        "op by op": lambda: decoder.decoder.forward(batch, decoder.cache),
        "ceiling compiled": decoder.program.again,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model", type=Path, required=True)
    options, rest = parser.parse_known_args()
    runner = open_model(options.model).engine.runner
    assert isinstance(runner, LocalRunner), "it computes here"
    assert isinstance(runner.decoder, OneCallDecoder), "its steps are one call"
    name, sys.argv = options.model.name, [sys.argv[0], *rest]
    cases = {f"{name}, {n} texts": partial(step, n, runner.decoder) for n in TEXTS}
    timing.kernel_main(__doc__ or "", cases)
