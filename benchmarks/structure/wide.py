"""A width stage at the widths of 7B: memory, and obs against a GPTQ solve of the same linear.

    python -m benchmarks.structure.wide [--parts run solves] [--work FOLDER]

One block of llama-7b with random weights and real text, `ffn: 0.667` with obs and drift, from 9
rows of 256 tokens in fp32: the whole run's resident peak and processor time. Then, in this process
and one after the other, what obs takes to choose two thirds of the columns of a `down` of
[4096, 11008], what our gptq takes to round it (4 bits, groups of 128; solved, and held against
plain rounding), and the solve alone: factor and column loop with a scale search of 40 ratios.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import REPO, RESULTS, package_versions, run, setting
from benchmarks.quality.tools import OUR_PACKAGES
from benchmarks.structure.points import CALIBRATION, LENGTH
from compress.edits.select.obs import select
from compress.methods.gptq import GptqConfig, quantize
from compress.methods.observed import Observed
from compress.quant.scheme import QuantScheme
from compress_kernels import Grid, SearchedScales, gptq_columns, hessian_factor

ROWS, SHARE = 9, 0.667
DOWN = (4096, 11008)
GROUP, BITS = 128, 4


def whole_run(work: Path) -> dict[str, float]:
    """The stage of width."""
    return run_of({"method": "prune_width", "ffn": SHARE}, work)


def run_of(stage: Mapping[str, Any], work: Path) -> dict[str, float]:
    """A stage by the command line, in a process of its own. others: share of the machine that went
    to other work."""
    work.mkdir(parents=True, exist_ok=True)
    model = work / "llama-7b"
    if not (model / "config.json").is_file():
        command = [sys.executable, "-m", "benchmarks.models", "llama-7b", str(model)]
        run([*command, "--blocks", "1"], work / "model.log")
    recipe = {
        "name": "wide",
        "stages": [dict(stage)],
        "calibration": {
            "sources": [{"text": str(CALIBRATION)}], "samples": ROWS, "length": LENGTH
        },
    }  # fmt: skip
    (work / "recipe.yaml").write_text(json.dumps(recipe))
    words = ["run", str(work / "recipe.yaml"), "--model", str(model), "--dtype", "fp32"]
    words += ["--out", str(work / "out"), "--overwrite"]
    cost = run([sys.executable, "-m", "compress.cli", *words], work / "run.log")
    return {"peak_rss_gb": cost.peak_rss_bytes / 1e9, "cpu_s": cost.cpu_s, "others": cost.others}


def solves(work: Path) -> dict[str, float]:
    """Processor seconds of a choice by obs, of gptq and of its solve."""
    n, k = DOWN
    torch.manual_seed(0)
    inputs, weight = torch.randn(k, k), torch.randn(n, k)
    gram = (inputs.T @ inputs).div_(k)
    gram.diagonal().add_(0.01 * gram.diagonal().mean())
    del inputs
    found = {"obs_cpu_s": timed(lambda: select(gram, weight, int(SHARE * k)))}
    scheme = QuantScheme(bits=BITS, granularity="group", group_size=GROUP)
    seen = Observed(hessian=gram)
    rounded = partial(quantize, [weight], scheme, GptqConfig(), observed=seen)
    found["gptq_cpu_s"] = timed(partial(rounded, scale_dtype=torch.bfloat16))
    found["solve_cpu_s"] = timed(lambda: solve(weight, gram))
    return found


def solve(weight: torch.Tensor, gram: torch.Tensor) -> None:
    factor = hessian_factor(gram.clone())
    scales = SearchedScales(torch.linspace(1.0, 0.5, 40), factor.diagonal().square())
    gptq_columns(weight, factor, Grid(BITS, True, torch.bfloat16), GROUP, scales)


PARTS: Mapping[str, Callable[[Path], dict[str, float]]] = {"run": whole_run, "solves": solves}


def timed(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=REPO / "out" / "structure" / "wide")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    options = parser.parse_args()
    path = RESULTS / "structure_wide.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    numbers = {k: v for part in options.parts for k, v in PARTS[part](options.work).items()}
    found |= {
        **setting("benchmarks.structure.wide"),
        "versions": package_versions(sys.executable, OUR_PACKAGES),
        "rows": ROWS,
        "length": LENGTH,
        **{name: round(value, 3) for name, value in numbers.items()},
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
