"""Speed and memory of `compress-model export` on a packed checkpoint of the 7B shape.

    python -m benchmarks.conversion [--work /tmp] [--blocks 32] [--to gptq awq]

Random weights are made here, rounded to 4 bits in groups of 128 (3.9 GB), exported to each format
and removed. Beside every export the packed files are copied: read from the disk, not from the page
cache, and synced, which is the least that a conversion has to do. Both in turn, RUNS times; best
against best.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.memory import make
from benchmarks.processes import package_versions, run, setting, wait_until_quiet, write_result

RUNS = 3
PEAK_BAR = 2.5e9  # bytes
COPY_SHARE, LEAST_RATE = 0.6, 0.15e9  # of the copy's speed; bytes of packed input a second
CHUNK = 16 << 20
FORMATS = ("gptq", "awq")


def pack(work: Path, blocks: int) -> Path:
    """A packed checkpoint, the dense one it came from removed."""
    dense, packed = make(work, blocks), work / "packed"
    command = [sys.executable, "-m", "compress.cli", "run", "int4-rtn", "--model", str(dense)]
    plain = ["--set", "evaluation=null", "--set", "stages[0].scale_search=minmax"]
    run([*command, "--out", str(packed), *plain], work / "pack.log")
    shutil.rmtree(dense)
    return packed


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def forget(folder: Path) -> None:
    """Write back and drop the pages of a folder's weight files from the cache."""
    for path in weight_files(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def copy_seconds(source: Path, target: Path) -> float:
    """Copying the weight files, from the disk and to it."""
    forget(source)
    target.mkdir()
    buffer = memoryview(bytearray(CHUNK))
    began = time.perf_counter()
    for path in weight_files(source):
        with path.open("rb", buffering=0) as src, (target / path.name).open("wb", 0) as out:
            while got := src.readinto(buffer):
                out.write(buffer[:got])
            os.fsync(out.fileno())
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


def export(source: Path, fmt: str, work: Path) -> dict[str, Any]:
    """One export, as a process of its own, from the disk."""
    forget(source)
    out = work / f"to-{fmt}"
    command = [sys.executable, "-m", "compress.cli", "export", str(source), "--to", fmt]
    cost = run([*command, "--out", str(out)], work / f"{fmt}.log")
    written = sum(path.stat().st_size for path in weight_files(out))
    shutil.rmtree(out)
    return {
        "wall_s": round(cost.wall_s, 2),
        "cpu_s": round(cost.cpu_s, 2),
        "peak_rss_bytes": cost.peak_rss_bytes,
        "machine_used_by_others": round(cost.others, 3),
        "result_bytes": written,
    }


def compare(source: Path, fmt: str, work: Path, quiet: float) -> dict[str, Any]:
    """Exports and copies in turn; whether the bars are met."""
    size = sum(path.stat().st_size for path in weight_files(source))
    copies, exports = [], []
    for _ in range(RUNS):
        wait_until_quiet(quiet)
        copies.append(copy_seconds(source, work / "copy"))
        exports.append(export(source, fmt, work))
    copied, converted = size / min(copies), size / min(one["wall_s"] for one in exports)
    peak, bar = max(one["peak_rss_bytes"] for one in exports), COPY_SHARE * copied
    return {
        "packed_bytes": size,
        "exports": exports,
        "copies_s": [round(one, 2) for one in copies],
        "export_gb_per_s": round(converted / 1e9, 3),
        "copy_gb_per_s": round(copied / 1e9, 3),
        "bar_gb_per_s": round(min(bar, LEAST_RATE) / 1e9, 3),
        "met": converted >= min(bar, LEAST_RATE) and peak < PEAK_BAR,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--to", nargs="+", default=FORMATS, metavar="FORMAT")
    parser.add_argument("--quiet", type=float, default=0.1, help="start when others use less")
    options = parser.parse_args()
    result = setting("benchmarks.conversion")
    result["versions"] = package_versions(sys.executable, ("torch", "safetensors"))
    work = Path(tempfile.mkdtemp(prefix="compress-model-", dir=options.work))
    try:
        source = pack(work, options.blocks)
        result |= {fmt: compare(source, fmt, work, options.quiet) for fmt in options.to}
    finally:
        shutil.rmtree(work)
    write_result("conversion_7b", result)


if __name__ == "__main__":
    main()
