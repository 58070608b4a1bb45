"""Processor time of planning an export, and of whole exports beside those of an earlier clone.

    python -m benchmarks.export.planning MODEL --before CLONE

MODEL is a checkpoint of the 7B shape in 4 bits (benchmarks.models, then `run int4-rtn`). What a
plan costs is measured in this process, warm. A dry run and an export without a proof, which would
take the whole model in memory, are whole processes, the clone's and ours in turn; a start of
Python with torch is in them.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.processes import REPO, package_versions, run, setting, write_result

TARGETS = ("onnx", "onnx-genai", "tensorrt", "gguf")
ROOTS = (".", "calibration", "exporters", "kernels")
PACKAGES = ("torch", "safetensors", "onnx-ir", "onnx", "gguf")
REPEATS = 3  # of plans and dry runs; an export is done once


def plan_seconds(model: Path, target: str) -> float:
    """Median processor time of Exporter.plan."""
    from compress.checkpoint import Checkpoint
    from compress.formats import open_weights
    from compress_exporters.exporter import Options
    from compress_exporters.table import EXPORTERS

    taken = []
    for _ in range(REPEATS + 1):
        source = open_weights(Checkpoint.open(model))
        began = time.process_time()
        EXPORTERS[target].plan(source, Options(dtype="fp16"))
        taken.append(time.process_time() - began)
    return round(statistics.median(taken[1:]), 2)  # the first imports packages


def export_seconds(clone: Path, model: Path, target: str, work: Path, *how: str) -> float:
    """Processor time of the command, in the code of a clone."""
    out = work / "out"
    command = [sys.executable, "-P", "-m", "compress.cli", "export", str(model), "--to", target]
    places = os.pathsep.join(str(clone / root) for root in ROOTS)
    cost = run(
        [*command, "--out", str(out), "--dtype", "fp16", *how],
        work / "log",
        {**os.environ, "PYTHONPATH": places},
    )
    shutil.rmtree(out, ignore_errors=True)
    return cost.cpu_s


def in_turn(clones: dict[str, Path], repeats: int, *asked: Any) -> dict[str, float]:
    """Median of each clone."""
    taken: dict[str, list[float]] = {name: [] for name in clones}
    for _ in range(repeats):
        for name, clone in clones.items():
            taken[name].append(export_seconds(clone, *asked))
    return {name: round(statistics.median(found), 1) for name, found in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--before", type=Path, required=True, help="a clone of an earlier commit")
    parser.add_argument("--to", nargs="+", default=list(TARGETS), metavar="TARGET")
    options = parser.parse_args()
    result = setting("benchmarks.export.planning")
    result["versions"] = package_versions(sys.executable, PACKAGES)
    clones = {"before": options.before, "after": REPO}
    work = Path(tempfile.mkdtemp(prefix="compress-model-", dir=options.model.parent))
    try:
        for target in options.to:
            asked = options.model, target, work
            result[target] = {
                "plan": plan_seconds(options.model, target),
                "dry_run": in_turn(clones, REPEATS, *asked, "--dry-run"),
                "export": in_turn(clones, 1, *asked, "--no-verify"),
            }
    finally:
        shutil.rmtree(work)
    write_result("export_planning", result)


if __name__ == "__main__":
    main()
