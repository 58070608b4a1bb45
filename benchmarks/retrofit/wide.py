"""A latent at the widths of 7B: resident peak and processor time of one block.

    python -m benchmarks.retrofit.wide [--work FOLDER]

One block of llama-7b (hidden 4096, 32 heads of 128, ffn 11008) with random weights and real text,
`rank: 512, rope_dim: 64, rope: stride` of 8,192 numbers a token, with the refit, from 9 rows of 256
tokens in fp32, as benchmarks.structure.wide measures a width: the whole run by the command line.
The result goes to benchmarks/results/retrofit_wide.json.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.processes import REPO, package_versions, setting, write_result
from benchmarks.quality.tools import OUR_PACKAGES
from benchmarks.structure.points import LENGTH
from benchmarks.structure.wide import ROWS, run_of

STAGE = {"method": "mla", "rank": 512, "rope_dim": 64, "rope": "stride"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=REPO / "out" / "structure" / "wide")
    options = parser.parse_args()
    numbers = run_of(STAGE, options.work)
    found = {
        **setting("benchmarks.retrofit.wide"),
        "versions": package_versions(sys.executable, OUR_PACKAGES),
        "stage": STAGE,
        "rows": ROWS,
        "length": LENGTH,
        **{name: round(value, 3) for name, value in numbers.items()},
    }
    write_result("retrofit_wide", found)


if __name__ == "__main__":
    main()
