"""What share of a run's processor time goes into the digests that hold reads to the sha256.

    python -m benchmarks.models llama-7b MODEL --blocks 2
    python -m benchmarks.digests int4-rtn MODEL

A data-free run without evaluation, into a folder that is removed again. The clock is that of the
thread that makes the digests, in the pass that makes the sha256 and at every read, so that a busy
machine changes little.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compress.checkpoint import seal
from compress.checkpoint.chunks import FileDigests
from compress.verbs import run


def clocked(work: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def measured(*arguments: Any) -> Any:
        began = time.thread_time()
        try:
            return work(*arguments)
        finally:
            spent.append(time.thread_time() - began)

    return measured


def share(recipe: str, model: Path) -> dict[str, float]:
    """Processor seconds of the run and of its digests."""
    hashing, reading = list[float](), list[float]()
    FileDigests.update = clocked(FileDigests.update, hashing)  # type: ignore[method-assign]
    seal.digests_of = clocked(seal.digests_of, reading)
    began = time.process_time()
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        run(recipe, model, Path(folder) / "out", overrides=["evaluation=null"])
    total = time.process_time() - began
    found = {"run": total, "hashing": sum(hashing), "reading": sum(reading)}
    return found | {"share": (found["hashing"] + found["reading"]) / total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("model", type=Path)
    options = parser.parse_args()
    print(json.dumps(share(options.recipe, options.model), indent=1))


if __name__ == "__main__":
    main()
