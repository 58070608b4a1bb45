"""Peak memory of exports to other runtimes, of a checkpoint with the widths of a 7B model.

    python -m benchmarks.export.memory [--work /tmp] [--blocks 1] [--to onnx gguf]

Random weights are made here, dense (bf16) and rounded to 4 bits in groups of 128, and removed.
Weights pass one at a time, so the largest, embedding and head, set the peak: one block beside them
is enough to see it. Peaks are those of the whole process as the kernel counts them; nothing is
verified, which would take the whole model.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.memory import make
from benchmarks.processes import package_versions, run, setting, write_result

BAR = 1.5e9  # bytes
TARGETS = ("onnx", "gguf")
CLI = (sys.executable, "-m", "compress.cli")


def rounded(dense: Path, work: Path) -> Path:
    """The same in 4 bits."""
    packed = work / f"{dense.name}-int4"
    plain = ("--set", "evaluation=null", "--set", "stages[0].scale_search=minmax")
    command = [*CLI, "run", "int4-rtn", "--model", str(dense), "--out", str(packed), *plain]
    run(command, work / "pack.log")
    return packed


def export(source: Path, target: str, work: Path) -> dict[str, Any]:
    """One export, as a process of its own."""
    out = work / f"to-{target}"
    command = [*CLI, "export", str(source), "--to", target, "--out", str(out)]
    cost = run([*command, "--dtype", "fp16", "--no-verify"], work / f"{target}.log")
    size = sum(path.stat().st_size for path in out.iterdir() if path.is_file())
    shutil.rmtree(out)
    return {
        "peak_rss_bytes": cost.peak_rss_bytes,
        "met": cost.peak_rss_bytes < BAR,
        "source_bytes": sum(path.stat().st_size for path in source.glob("*.safetensors")),
        "result_bytes": size,
    }


def of_blocks(blocks: int, targets: list[str], work: Path) -> dict[str, Any]:
    dense = make(work, blocks)
    sources = {"dense": dense, "int4": rounded(dense, work)}
    found = {
        name: {target: export(source, target, work) for target in targets}
        for name, source in sources.items()
    }
    for source in sources.values():
        shutil.rmtree(source)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--blocks", type=int, nargs="+", default=[1])
    parser.add_argument("--to", nargs="+", default=list(TARGETS), metavar="TARGET")
    options = parser.parse_args()
    result = setting("benchmarks.export.memory")
    packages = ("torch", "safetensors", "onnx-ir", "onnx")
    result["versions"] = package_versions(sys.executable, packages)
    result["bar_bytes"] = BAR
    work = Path(tempfile.mkdtemp(prefix="compress-model-", dir=options.work))
    try:
        for blocks in options.blocks:
            result[f"{blocks} blocks"] = of_blocks(blocks, options.to, work)
    finally:
        shutil.rmtree(work)
    write_result("export_memory", result)


if __name__ == "__main__":
    main()
