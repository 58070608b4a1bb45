"""Peak memory and time of exports of a checkpoint with the widths of a 7B model.

    python -m benchmarks.export.memory --blocks 32
    python -m benchmarks.export.memory --blocks 1 4 --builder

Random weights are made here, dense (bf16) and rounded to 4 bits in groups of 128, and removed.
32 blocks are the whole model, 13.5 GB. Peaks are those of the whole process as the kernel counts
them; nothing is verified, which would take the whole model in memory. builder: onnxruntime-genai's
own builder makes 4 bits of the dense source; beside it stand the rounding and the export that
make the same of it here.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.export.genai_speed import building
from benchmarks.memory import make
from benchmarks.processes import Cost, package_versions, run, setting, write_result

BAR = 1.5e9  # bytes
TARGETS = ("onnx", "onnx-genai", "tensorrt", "gguf")
CLI = (sys.executable, "-m", "compress.cli")
PACKAGES = ("torch", "safetensors", "onnx-ir", "onnx")


def rounded(dense: Path, work: Path) -> tuple[Path, Cost]:
    """The same in 4 bits."""
    packed = work / f"{dense.name}-int4"
    plain = ("--set", "evaluation=null", "--set", "stages[0].scale_search=minmax")
    command = [*CLI, "run", "int4-rtn", "--model", str(dense), "--out", str(packed), *plain]
    return packed, run(command, work / "pack.log")


def export(source: Path, target: str, work: Path) -> dict[str, Any]:
    """One export, as a process of its own."""
    out = work / f"to-{target}"
    command = [*CLI, "export", str(source), "--to", target, "--out", str(out)]
    cost = run([*command, "--dtype", "fp16", "--no-verify"], work / f"{target}.log")
    return {"source_bytes": weights(source), "result_bytes": taken(out), **described(cost)}


def built(dense: Path, work: Path) -> dict[str, Any]:
    """The same by onnxruntime-genai's builder, in 4 bits."""
    out = work / "built"
    cost = run(building(dense, out, work / "cache"), work / "builder.log")
    return {"source_bytes": weights(dense), "result_bytes": taken(out), **described(cost)}


def described(cost: Cost) -> dict[str, Any]:
    return {
        "peak_rss_bytes": cost.peak_rss_bytes,
        "met": cost.peak_rss_bytes < BAR,
        "wall_s": round(cost.wall_s, 1),
        "cpu_s": round(cost.cpu_s, 1),
        "machine_used_by_others": round(cost.others, 3),
    }


def weights(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def taken(folder: Path) -> int:
    """Bytes of a folder's files, which is removed."""
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    shutil.rmtree(folder)
    return size


def of_blocks(blocks: int, targets: list[str], builder: bool, work: Path) -> dict[str, Any]:
    dense = make(work, blocks)
    packed, rounding = rounded(dense, work)
    found: dict[str, Any] = {"rounding": described(rounding)}
    # One after the other, and the dense source removed in between: the disk holds two at a time.
    if builder:
        found["builder"] = built(dense, work)
    found["dense"] = {target: export(dense, target, work) for target in targets}
    shutil.rmtree(dense)
    found["int4"] = {target: export(packed, target, work) for target in targets}
    shutil.rmtree(packed)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--blocks", type=int, nargs="+", default=[1])
    parser.add_argument("--to", nargs="+", default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--builder", action="store_true", help="measure onnxruntime-genai's, too")
    options = parser.parse_args()
    result = setting("benchmarks.export.memory")
    packages = (*PACKAGES, *(("onnxruntime-genai",) if options.builder else ()))
    result["versions"] = package_versions(sys.executable, packages)
    result["bar_bytes"] = BAR
    work = Path(tempfile.mkdtemp(prefix="compress-model-", dir=options.work))
    try:
        for blocks in options.blocks:
            found = of_blocks(blocks, options.to, options.builder, work)
            result[f"{blocks} blocks"] = found
    finally:
        shutil.rmtree(work)
    write_result("export_memory_builder" if options.builder else "export_memory", result)


if __name__ == "__main__":
    main()
