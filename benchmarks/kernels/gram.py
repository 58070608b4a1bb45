"""Time of adding bf16 xᵀx to a Hessian against the fp32 matrix product.

python benchmarks/kernels/gram.py --output benchmarks/results/gram.json
"""

import argparse
from typing import Any

import timing
import torch

from compress_kernels import gram_, status

SHAPES = [(4096, 512), (32768, 512), (8192, 1408), (4096, 4096)]


def measure(tokens: int, columns: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(tokens, columns).bfloat16()
    ours, theirs = torch.zeros(columns, columns), torch.zeros(columns, columns)

    def product() -> None:
        x32 = x.float()
        theirs.addmm_(x32.T, x32)

    times = timing.alternate({"gram": lambda: gram_(x, ours), "fp32_product": product}, rounds)
    operations = tokens * columns * columns  # of the triangle, a multiply-add counted as two
    return {
        "times": times,
        "speedup": {
            unit: round(times["fp32_product"][unit] / times["gram"][unit], 2)
            for unit in ("wall_s", "cpu_s", "least_wall_s")
        },
        "triangle_gflop_per_cpu_s": round(operations / times["gram"]["cpu_s"] / 1e9, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", help="file for the JSON result")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result = {**timing.setting(), "kernel": status()["cpu_gram"], "shapes": {}}
    for tokens, columns in SHAPES:
        result["shapes"][f"{tokens}x{columns}"] = measure(tokens, columns, arguments.rounds)
    timing.write(arguments.output, result)


if __name__ == "__main__":
    main()
