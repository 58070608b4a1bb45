"""Peak memory and time on a checkpoint of the 7B shape (random weights, made here and removed).

    python -m benchmarks.memory [--work /tmp] [--only rtn|gptq]

rtn: the whole checkpoint (13.5 GB) through `int4-rtn`, nothing evaluated. gptq: one block of the
same widths, calibrated on 16 x 2048 tokens of real text with a spill budget of 64 MB. Peaks are
those of the whole process as the kernel counts them.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.processes import (
    REPO,
    SHARED,
    Cost,
    package_versions,
    run,
    setting,
    wait_until_quiet,
    write_result,
)

TEXT = SHARED / "text" / "calibration" / "wiki.utf8"
GPTQ = f"""\
name: one-block
stages:
  - method: gptq
    scheme: W4A16
calibration:
  sources: [{{text: {TEXT}}}]
  samples: 16
  length: 2048
  spill_bytes: 67108864
"""
BARS = {"rtn": 2.5e9, "gptq": 6e9}


def compress(recipe: str, model: Path, out: Path, quiet: float) -> Cost:
    wait_until_quiet(quiet)
    command = [sys.executable, "-m", "compress.cli", "run", recipe, "--model", str(model)]
    return run([*command, "--out", str(out), "--set", "evaluation=null"], out.with_suffix(".log"))


def rtn(work: Path, quiet: float) -> dict[str, Any]:
    """The 32 blocks through data-free rounding."""
    model, out = make(work, blocks=32), work / "rtn"
    return describe("rtn", compress("int4-rtn", model, out, quiet), model, out)


def gptq(work: Path, quiet: float) -> dict[str, Any]:
    """One block through calibration and GPTQ."""
    model, out, recipe = make(work, blocks=1), work / "gptq", work / "gptq.yaml"
    recipe.write_text(GPTQ)
    return describe("gptq", compress(str(recipe), model, out, quiet), model, out)


def make(work: Path, blocks: int) -> Path:
    """A checkpoint, made by a process of its own so that this one stays small."""
    model = work / f"llama-7b-{blocks}"
    command = [sys.executable, "-m", "benchmarks.models", "llama-7b", str(model)]
    subprocess.run([*command, "--blocks", str(blocks)], check=True, cwd=REPO)
    return model


def describe(name: str, cost: Cost, model: Path, out: Path) -> dict[str, Any]:
    """What the run took, beside what the run itself reports."""
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    report = json.loads((out / "report" / "report.json").read_text())
    (stage,) = report["stages"]
    return {
        "source_bytes": size,
        "result_bytes": report["result"]["bytes"],
        "peak_rss_bytes": cost.peak_rss_bytes,
        "bar_bytes": BARS[name],
        "met": cost.peak_rss_bytes < BARS[name],
        "wall_s": round(cost.wall_s, 1),
        "cpu_s": round(cost.cpu_s, 1),
        "source_gb_per_s": round(size / cost.wall_s / 1e9, 3),
        "machine_used_by_others": round(cost.others, 3),
        "reported": {
            "seconds": round(stage["seconds"], 1),
            "peak_rss_bytes": stage["peak_rss_bytes"],
            "planned": report["plan_vs_actual"],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--only", choices=BARS)
    parser.add_argument("--quiet", type=float, default=0.1, help="start when others use less")
    options = parser.parse_args()
    result = setting("benchmarks.memory")
    result["versions"] = package_versions(sys.executable, ("torch", "transformers", "safetensors"))
    for name, part in (("rtn", rtn), ("gptq", gptq)):
        if options.only in (None, name):
            work = Path(tempfile.mkdtemp(prefix="compress-model-", dir=options.work))
            try:
                result[name] = part(work, options.quiet)
            finally:
                shutil.rmtree(work)
    write_result("memory_7b" if options.only is None else f"memory_7b_{options.only}", result)


if __name__ == "__main__":
    main()
