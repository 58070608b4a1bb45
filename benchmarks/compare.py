"""Every built-in recipe that trains nothing, compared on one model: the table of docs/compare.md.

    python -m benchmarks.compare examples/tale-6m OUT [--for llama.cpp] [--within 5MB] [--kl 0.05]

OUT keeps the page. What is stored has the figures, the winner and what was left out, by runtime.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.processes import busy_seconds, setting, write_result
from compress.byte_sizes import byte_size
from compress.report.comparison.records import Comparison
from compress.report.comparison.table import render_comparison
from compress.verbs import CompareOptions, compare

FIGURES = (
    *("name", "bytes", "file", "bits_per_weight", "kl", "perplexity", "top1_agreement"),
    *("kv_bytes_per_token", "tokens_per_second", "on_kl_front", "on_perplexity_front"),
)


def figures(found: Comparison) -> dict[str, Any]:
    """Without paths, which are of one machine."""
    return {
        "winner": found.winner,
        "source": {
            "bytes": found.source.bytes,
            "perplexity": found.measured.perplexity,
            "tokens_per_second": found.measured.tokens_per_second,
        },
        "tokens": found.measured.tokens,
        "results": [{key: getattr(one, key) for key in FIGURES} for one in found.contenders],
        "left_out": {left.name: left.reason for left in found.left_out},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--for", dest="runtime")
    parser.add_argument("--within", type=byte_size)
    parser.add_argument("--kl", type=float)
    parser.add_argument("--name", default="compare_tale-6m")
    options = parser.parse_args()
    asked = CompareOptions(runtime=options.runtime, within=options.within, kl=options.kl)
    began, processor, busy = time.perf_counter(), time.process_time(), busy_seconds()
    found = compare(options.model, options.out, asked=asked)
    spent = {
        "wall_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(time.process_time() - processor, 1),
        "machine_busy_s": round(busy_seconds() - busy, 1),
    }
    print(render_comparison(found, options.out / "compare.html"))
    write_result(
        options.name, {"setting": setting("benchmarks.compare"), "spent": spent, **figures(found)}
    )


if __name__ == "__main__":
    main()
