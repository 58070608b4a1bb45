"""What it costs that an op runs on two threads: the kept team beside a thread started for the op.

    python benchmarks/kernels/team.py --output benchmarks/results/kernel_team.json

Of 4000 ops the second, the fiftieth and the ninetieth percentile in microseconds. gap: microseconds
of other work between two ops; beyond 50 helpers are asleep. On a busy machine the second percentile
tells of the code, and the ninetieth of who else runs.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import timing

from compress_kernels.cpu.build import SOURCES, compiler

PROBE = Path(__file__).with_suffix(".cpp")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", help="file for the JSON result")
    options = parser.parse_args()
    result: dict[str, Any] = {**timing.setting(), "threads": 2, "microseconds": {}}
    for line in probe().splitlines():
        name, gap, *quantiles = line.split()
        result["microseconds"].setdefault(f"gap {gap}", {})[name] = dict(
            zip(("p2", "p50", "p90"), map(float, quantiles), strict=True)
        )
    timing.write(options.output, result)


def probe() -> str:
    """What team.cpp prints."""
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "team")
        sources = [str(PROBE), str(SOURCES / "team.cpp")]
        flags = ["-O3", "-std=c++17", "-pthread", f"-I{SOURCES}"]
        subprocess.run([compiler(), *flags, *sources, "-o", program], check=True)
        return subprocess.run([program], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
